"""Bidirectional LSTM over packed sequences: texts of other lengths in each batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

VOCAB, DIM, CLASSES = 500, 48, 5


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.lstm = nn.LSTM(DIM, DIM, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * DIM, CLASSES)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.embed(ids), lengths, batch_first=True, enforce_sorted=False
        )
        states, _ = self.lstm(packed)
        return self.head(pad_packed_sequence(states, batch_first=True)[0])


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Tagger().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    while True:
        lengths = torch.randint(3, 20, (16,), generator=g)
        texts = [torch.randint(1, VOCAB, (n,), generator=g) for n in lengths.tolist()]
        ids = pad_sequence(texts, batch_first=True)
        tags = torch.where(ids > 0, ids % CLASSES, -100).to(device)
        logits = model(ids.to(device), lengths)
        loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()
