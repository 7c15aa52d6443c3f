"""A multilayer perceptron classifier."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, features: int = 32, hidden: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(x), labels)


def random_batch(
    generator: torch.Generator, size: int = 16, features: int = 32, classes: int = 10
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features ``[size, features]`` and labels."""
    return (
        torch.randn(size, features, generator=generator),
        torch.randint(classes, (size,), generator=generator),
    )
