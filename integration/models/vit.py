"""A vision transformer."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    """Pre-norm block on ``nn.MultiheadAttention``."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches by convolution, a class token, transformer blocks, a linear head.

    Args:
        pixels, patch: Edges of the image and of a patch.
        layers, dim, heads: Size of the model.
        classes: Number of labels.
    """

    def __init__(
        self,
        pixels: int = 16,
        patch: int = 4,
        layers: int = 2,
        dim: int = 32,
        heads: int = 2,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, 1 + (pixels // patch) ** 2, dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(images), labels)


def random_batch(
    generator: torch.Generator, size: int = 4, pixels: int = 16, classes: int = 10
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images ``[size, 3, pixels, pixels]`` and labels."""
    return (
        torch.randn(size, 3, pixels, pixels, generator=generator),
        torch.randint(classes, (size,), generator=generator),
    )
