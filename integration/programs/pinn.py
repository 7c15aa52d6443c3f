"""A physics-informed network: Burgers' equation by LBFGS, with second derivatives in the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn


def network(width: int = 32) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(2, width), nn.Tanh()]
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def derivative(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = network().to(device)
    inside = torch.rand(256, 2, generator=g).to(device)
    x = (inside[:, :1] * 2 - 1).requires_grad_()
    t = inside[:, 1:].clone().requires_grad_()
    x0 = torch.linspace(-1, 1, 64, device=device)[:, None]
    u0 = -torch.sin(math.pi * x0)
    side = torch.tensor([-1.0, 1.0], device=device).repeat(32)[:, None]
    t_side = torch.rand(64, 1, generator=g).to(device)
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=4, history_size=10, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        u = model(torch.cat([x, t], dim=1))
        u_t, u_x = derivative(u, t), derivative(u, x)
        residual = u_t + u * u_x - 0.01 / math.pi * derivative(u_x, x)
        start = model(torch.cat([x0, torch.zeros_like(x0)], dim=1)) - u0
        border = model(torch.cat([side, t_side], dim=1))
        loss = residual.square().mean() + start.square().mean() + border.square().mean()
        loss.backward()
        return loss

    while True:
        yield optimizer.step(closure).item()
