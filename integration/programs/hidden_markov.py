"""A hidden Markov model: the forward algorithm in a Python loop, trained, and Viterbi paths."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

STATES, SYMBOLS, BATCH = 12, 20, 8


class HMM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(STATES))
        self.moves = nn.Parameter(torch.randn(STATES, STATES))
        self.emissions = nn.Parameter(torch.randn(STATES, SYMBOLS))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Log-likelihood of each sequence."""
        moves, emissions = self.moves.log_softmax(1), self.emissions.log_softmax(1)
        alpha = self.start.log_softmax(0) + emissions[:, x[:, 0]].T
        steps = [alpha]
        for t in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + moves, dim=1) + emissions[:, x[:, t]].T
            steps.append(alpha)
        scores = torch.stack(steps, 1).logsumexp(2)
        return scores.gather(1, lengths[:, None] - 1).squeeze(1)

    @torch.no_grad()
    def viterbi(self, x: torch.Tensor) -> list[int]:
        moves, emissions = self.moves.log_softmax(1), self.emissions.log_softmax(1)
        score = self.start.log_softmax(0) + emissions[:, x[0]]
        back = []
        for symbol in x[1:]:
            score, best = (score[:, None] + moves + emissions[:, symbol]).max(0)
            back.append(best)
        path = [int(score.argmax())]
        for best in reversed(back):
            path.append(int(best[path[-1]]))
        return path[::-1]


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = HMM().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    step = 0
    while True:
        lengths = torch.randint(5, 25, (BATCH,), generator=g)
        x = torch.randint(SYMBOLS, (BATCH, int(lengths.max())), generator=g)
        loss = -(model(x.to(device), lengths.to(device)) / lengths.to(device)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        path = model.viterbi(x[0].to(device)) if step % 5 == 0 else []
        yield loss.item() + len(set(path))
