"""Denoising diffusion of small images, with an exponential average of the weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

TIMES, SIZE, WIDTH = 100, 16, 32


class Block(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, a), nn.Conv2d(a, b, 3, padding=1)
        self.time = nn.Linear(64, b)
        self.skip = nn.Conv2d(a, b, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.skip(x) + F.silu(
            self.conv(F.silu(self.norm(x))) + self.time(t)[..., None, None]
        )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.down, self.middle = Block(WIDTH, WIDTH), Block(WIDTH, WIDTH)
        self.up = Block(2 * WIDTH, WIDTH)
        self.out = nn.Conv2d(WIDTH, 1, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(-math.log(1e4) * torch.arange(32, device=x.device) / 32)
        angles = t[:, None].float() * rates
        t = torch.cat([angles.sin(), angles.cos()], dim=1)
        high = self.down(self.into(x), t)
        low = self.middle(F.avg_pool2d(high, 2), t)
        return self.out(self.up(torch.cat([high, F.interpolate(low, scale_factor=2)], dim=1), t))


def run(device: str) -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = UNet().to(device)
    average = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.05, TIMES), 0).to(device)
    step = 0
    while True:
        x = torch.randn(16, 1, SIZE, SIZE, generator=g).to(device).sign()
        noise = torch.randn(16, 1, SIZE, SIZE, generator=g).to(device)
        t = torch.randint(TIMES, (16,), generator=g).to(device)
        a = kept[t][:, None, None, None]
        loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters()):
                mean.lerp_(p, 0.01)
        step += 1
        if step % 5 == 0:  # a few images by DDIM
            with torch.no_grad():
                x = torch.randn(4, 1, SIZE, SIZE, generator=g).to(device)
                for i in range(TIMES - 1, 0, -25):
                    e = average(x, torch.full((4,), i, device=device))
                    clean = (x - (1 - kept[i]).sqrt() * e) / kept[i].sqrt()
                    x = kept[max(i - 25, 0)].sqrt() * clean + (1 - kept[max(i - 25, 0)]).sqrt() * e
                loss = loss + x.abs().mean()
        yield loss.detach()
