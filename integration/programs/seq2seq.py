"""Translation by GRUs with attention: teacher forcing at random, decoding that stops early."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, DIM, START, END = 40, 64, 0, 1


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.encoder = nn.GRU(DIM, DIM, batch_first=True)
        self.cell = nn.GRUCell(2 * DIM, DIM)
        self.head = nn.Linear(2 * DIM, VOCAB)

    def attend(self, state: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        weights = torch.bmm(memory, state[:, :, None]).softmax(1)
        return (weights * memory).sum(1)

    def forward(
        self, source: torch.Tensor, target: torch.Tensor, forced: list[bool]
    ) -> torch.Tensor:
        memory, last = self.encoder(self.embed(source))
        state, context = last[0], torch.zeros_like(last[0])
        token, loss = torch.full_like(source[:, 0], START), 0.0
        for i, is_forced in enumerate(forced):
            state = self.cell(torch.cat([self.embed(token), context], 1), state)
            context = self.attend(state, memory)
            logits = self.head(torch.cat([state, context], 1))
            loss = loss + F.cross_entropy(logits, target[:, i])
            token = target[:, i] if is_forced else logits.argmax(1)
        return loss / len(forced)

    @torch.no_grad()
    def translate(self, source: torch.Tensor, limit: int = 16) -> list[int]:
        memory, last = self.encoder(self.embed(source))
        state, context = last[0], torch.zeros_like(last[0])
        token, made = torch.full_like(source[:, 0], START), []
        while len(made) < limit:
            state = self.cell(torch.cat([self.embed(token), context], 1), state)
            context = self.attend(state, memory)
            token = self.head(torch.cat([state, context], 1)).argmax(1)
            made.append(token.item())
            if made[-1] == END:
                break
        return made


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Seq2Seq().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = 0
    while True:
        length = int(torch.randint(4, 12, (), generator=g))
        source = torch.randint(2, VOCAB, (16, length), generator=g)
        end = torch.full((16, 1), END)
        target = torch.cat([source.flip(1), end], 1).to(device)
        forced = (torch.rand(length + 1, generator=g) < 0.5).tolist()
        loss = model(source.to(device), target, forced)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        words = model.translate(source[:1].to(device)) if step % 5 == 0 else []
        yield loss.item() + sum(words)
