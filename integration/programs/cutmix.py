"""CutMix: a rectangle of other images written into each batch, targets mixed by its area."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

SIZE, CLASSES = 32, 10


def network() -> nn.Module:
    def block(a: int, b: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)
        )

    blocks = nn.Sequential(block(3, 16), block(16, 32), block(32, 64))
    return nn.Sequential(blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def cutmix(x: torch.Tensor, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Images with a rectangle of others, those others' order, and the share that is left."""
    order = torch.randperm(len(x), generator=g).to(x.device)
    share = torch.rand((), generator=g).item()
    side = int(SIZE * (1 - share) ** 0.5)
    row, column = torch.randint(SIZE, (2,), generator=g).tolist()
    a, b = max(row - side // 2, 0), min(row + side // 2, SIZE)
    c, d = max(column - side // 2, 0), min(column + side // 2, SIZE)
    x[:, :, a:b, c:d] = x[order, :, a:b, c:d]
    return x, order, 1 - (b - a) * (d - c) / SIZE**2


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10_000)
    while True:
        x = torch.randn(32, 3, SIZE, SIZE, generator=g).to(device)
        y = torch.randint(CLASSES, (32,), generator=g).to(device)
        x, order, share = cutmix(x, g)
        logits = model(x)
        loss = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.item()
