"""A sequence classifier on ``nn.TransformerEncoder``, with padding."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    """Token embedding, PyTorch's own encoder layers, mean over the tokens that are not padding.

    Args:
        vocab, dim, heads, layers: Size of the model; token 0 is padding.
        classes: Number of labels.
        dropout: Probability of dropping an activation while training.
    """

    def __init__(
        self,
        vocab: int = 64,
        dim: int = 32,
        heads: int = 2,
        layers: int = 2,
        classes: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim, padding_idx=0)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(dim, classes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        padding = ids == 0
        x = self.layers(self.tokens(ids), src_key_padding_mask=padding)
        weights = (~padding).unsqueeze(-1).to(x.dtype)
        return self.head((x * weights).sum(1) / weights.sum(1))

    def loss(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(ids), labels)


def random_batch(
    generator: torch.Generator, size: int = 8, length: int = 16, vocab: int = 64, classes: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids ``[size, length]``, the last quarter of every other row padding, and labels."""
    ids = torch.randint(1, vocab, (size, length), generator=generator)
    ids[::2, length - length // 4 :] = 0
    return ids, torch.randint(classes, (size,), generator=generator)
