"""A neural ODE: Runge-Kutta with steps chosen from the error, gradients through the solver."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

Field = Callable[[torch.Tensor], torch.Tensor]


def heun_euler(f: Field, x: torch.Tensor, end: float, tolerance: float) -> tuple[torch.Tensor, int]:
    """Integrate to ``end``: how many steps that takes depends on the values."""
    t, h, steps = 0.0, 0.1, 0
    while t < end - 1e-9:
        h = min(h, end - t)
        k1 = f(x)
        k2 = f(x + h * k1)
        higher = x + h / 2 * (k1 + k2)
        with torch.no_grad():
            error = (h / 2 * (k2 - k1)).norm(dim=1).max().item()
        steps += 1
        if error <= tolerance:
            t, x = t + h, higher
        h *= min(2.0, max(0.2, 0.9 * (tolerance / max(error, 1e-12)) ** 0.5))
    return x, steps


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    field = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2)).to(device)
    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]], device=device)
    optimizer = torch.optim.RMSprop(field.parameters(), lr=1e-3)
    while True:
        start = (torch.randn(20, 2, generator=g) * 2).to(device)
        end = 0.2 + 0.6 * torch.rand((), generator=g).item()
        with torch.no_grad():
            true, _ = heun_euler(lambda x: x.pow(3).clamp(-5, 5) @ matrix, start, end, 0.1)
        guess, steps = heun_euler(lambda x: field(x**3), start, end, 0.05)
        loss = (guess - true).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item() + steps
