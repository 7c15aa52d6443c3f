"""ResNet-18 for small images, with a free choice of widths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """What brings a block's input to the shape of its output: nothing where it has that."""
    if stride == 1 and inputs == outputs:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm around a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.skip = shortcut(inputs, outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ResNet18(nn.Module):
    """Four stages of two blocks each, of the given widths.

    Args:
        widths: Channels of the stages; 64, 128, 256, 512 in the paper.
        classes: Number of labels.
    """

    def __init__(self, widths: Sequence[int] = (8, 16, 32, 64), classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        blocks: list[nn.Module] = []
        inputs = widths[0]
        for i, width in enumerate(widths):
            blocks += [BasicBlock(inputs, width, 2 if i else 1), BasicBlock(width, width, 1)]
            inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(images))))
        return self.head(self.pool(x).flatten(1))

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(images), labels)


def random_batch(
    generator: torch.Generator, size: int = 8, pixels: int = 16, classes: int = 10
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images ``[size, 3, pixels, pixels]`` and labels."""
    return (
        torch.randn(size, 3, pixels, pixels, generator=generator),
        torch.randint(classes, (size,), generator=generator),
    )
