"""A curriculum: images and batches change with the epoch, layers are unfrozen on the way."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

STAGES = ((12, 48), (18, 32), (24, 16))  # side and batch
STEPS = 6  # of a stage


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(24, 24, 3, padding=1, groups=4), nn.GroupNorm(4, 24), nn.SiLU())
            for _ in range(3)
        )
        self.head = nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def run(device: str) -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Net().to(device)
    model.blocks.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step = 0
    while True:
        stage = step // STEPS % len(STAGES)
        side, size = STAGES[stage]
        model.blocks[: stage + 1].requires_grad_(True)
        x = torch.randn(size, 3, 24, 24, generator=g).to(device)
        y = torch.randint(8, (size,), generator=g).to(device)
        x = x + y[:, None, None, None] / 4
        x = F.interpolate(
            x, size=(side, side), mode="bilinear", align_corners=False, antialias=True
        )
        # Simple examples first.
        losses = F.cross_entropy(model(x), y, reduction="none")
        kept = losses.detach().topk(size * (stage + 2) // 4, largest=False).indices
        loss = losses[kept].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        yield loss.detach()
