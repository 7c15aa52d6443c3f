"""A convolutional autoencoder that decodes with transposed convolutions."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F


class Autoencoder(nn.Module):
    """Two strided convolutions down to a code, two transposed ones back up to the image."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.LeakyReLU(0.1),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.LeakyReLU(0.1),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(2 * width, width, 3, stride=2, padding=1, output_padding=1),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(images))

    def loss(self, images: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self(images), images)


def random_batch(
    generator: torch.Generator, size: int = 8, pixels: int = 16
) -> tuple[torch.Tensor]:
    """Images ``[size, 1, pixels, pixels]`` with values from 0 to 1."""
    return (torch.rand(size, 1, pixels, pixels, generator=generator),)
