"""Beam search over a GRU: top-k over beams, states reordered, beams that end early."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

VOCAB, DIM, BEAMS, END, LIMIT = 60, 64, 5, 0, 20


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCAB, DIM), nn.GRUCell(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, token: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state = self.cell(self.embed(token), state)
        return self.head(state * 4).log_softmax(-1), state


@torch.no_grad()
def search(model: Model, state: torch.Tensor) -> tuple[list[int], float]:
    """The best text of those that ended, and its score by length."""
    device = state.device
    state = state.expand(BEAMS, -1)
    scores = torch.full((BEAMS,), -torch.inf, device=device)
    scores[0] = 0
    tokens = torch.full((BEAMS, 1), 1, device=device)
    best: tuple[float, list[int]] = (-torch.inf, [])
    for _ in range(LIMIT):
        log_p, state = model(tokens[:, -1], state)
        total = scores[:, None] + log_p
        scores, flat = total.view(-1).topk(BEAMS)
        parent, token = flat // VOCAB, flat % VOCAB
        tokens = torch.cat([tokens[parent], token[:, None]], dim=1)
        state = state[parent]
        ended = token == END
        if ended.any():
            for i in ended.nonzero().squeeze(1).tolist():
                score = scores[i].item() / tokens.shape[1] ** 0.7
                if score > best[0]:
                    best = score, tokens[i].tolist()
            scores = scores.masked_fill(ended, -torch.inf)
        if (scores.max() / tokens.shape[1] ** 0.7).item() < best[0]:
            break
    return best[1], best[0]


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Model().to(device).eval()
    while True:
        text, score = search(model, torch.randn(1, DIM, generator=g).to(device))
        yield sum(text) + max(score, -100.0)
