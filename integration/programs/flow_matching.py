"""Flow matching in the plane, with samples by Euler and midpoint steps now and then."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

BATCH = 256


class Velocity(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(2 + 8, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()),
            *(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)),
        )

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        angles = t[:, None] * (2 ** torch.arange(4, device=x.device)) * math.pi
        return self.net(torch.cat([x, angles.sin(), angles.cos()], dim=1))


def moons(n: int, g: torch.Generator) -> torch.Tensor:
    angle = torch.rand(n, generator=g) * math.pi
    upper = torch.rand(n, generator=g) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x, y], 1) + 0.05 * torch.randn(n, 2, generator=g)


@torch.no_grad()
def sample(model: Velocity, x: torch.Tensor, steps: int = 8) -> torch.Tensor:
    h = 1 / steps
    for i in range(steps):
        t = torch.full((len(x),), i * h, device=x.device)
        half = x + h / 2 * model(x, t)
        x = x + h * model(half, t + h / 2)
    return x


def run(device: str) -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Velocity().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = 0
    while True:
        target = moons(BATCH, g).to(device)
        noise = torch.randn(BATCH, 2, generator=g).to(device)
        t = torch.rand(BATCH, generator=g).to(device)
        x = torch.lerp(noise, target, t[:, None])
        loss = (model(x, t) - (target - noise)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:
            loss = loss + sample(model, torch.randn(64, 2, generator=g).to(device)).abs().mean()
        yield loss.detach()
