"""Language models of recurrent layers: LSTM or GRU."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU}


class RecurrentLM(nn.Module):
    """Embedding, a stack of recurrent layers, projection to the vocabulary.

    Args:
        kind: ``"lstm"`` or ``"gru"``.
        vocab, dim, layers: Size of the model.
    """

    def __init__(self, kind: str, vocab: int = 64, dim: int = 32, layers: int = 1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.rnn = KINDS[kind](dim, dim, layers, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.rnn(self.tokens(ids))
        return self.head(states)

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())


def random_batch(
    generator: torch.Generator, size: int = 4, length: int = 8, vocab: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and the ids that follow them, ``[size, length]`` each."""
    ids = torch.randint(vocab, (size, length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]
