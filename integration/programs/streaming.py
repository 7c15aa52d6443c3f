"""Streaming inference: bytes to tokens, chunks of other lengths through a recurrent model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

WORDS = "the cat sat on a mat while seven dogs ran past every old house in town".split()
VOCAB, DIM, CLASSES = 300, 64, 3


class Tokenizer:
    """Words become numbers when they are first seen; the rest waits for the next chunk."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.rest = ""

    def feed(self, text: str) -> list[int]:
        *words, self.rest = (self.rest + text).split(" ")
        return [self.ids.setdefault(w, len(self.ids) % VOCAB) for w in words if w]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.conv = nn.Conv1d(DIM, DIM, 3)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(
        self, ids: torch.Tensor, past: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.cat([past, self.embed(ids)], dim=1)
        h = torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        h, state = self.gru(h, state)
        return self.head(h).softmax(-1), x[:, -2:], state


def chunks(g: torch.Generator) -> Iterator[str]:
    """Text in pieces that end anywhere."""
    picks = torch.randint(len(WORDS), (30,), generator=g).tolist()
    text = " ".join(WORDS[i] for i in picks) + " "
    while text:
        n = int(torch.randint(5, 40, (), generator=g))
        yield text[:n]
        text = text[n:]


@torch.inference_mode()
def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model, tokenizer = Model().to(device).eval(), Tokenizer()
    while True:
        past = torch.zeros(1, 2, DIM, device=device)
        state = torch.zeros(1, 1, DIM, device=device)
        alarms, total = 0, 0.0
        for chunk in chunks(g):
            if ids := tokenizer.feed(chunk):
                p, past, state = model(torch.tensor([ids], device=device), past, state)
                alarms += int((p[0, :, 0] > 0.4).sum())
                total += p[0, -1].max().item()
        yield alarms + total
