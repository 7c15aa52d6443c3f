"""MAML: gradients through inner steps, by torch.func over a batch of tasks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

TASKS, SHOTS = 8, 10
Parameters = dict[str, torch.Tensor]


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = nn.Sequential(
        nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(parameters: Parameters, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(functional_call(model, parameters, (x,)), y)

    def adapted(parameters: Parameters, x: torch.Tensor, y: torch.Tensor) -> Parameters:
        for _ in range(2):
            gradients = grad(loss_of)(parameters, x, y)
            parameters = {k: p - 0.01 * gradients[k] for k, p in parameters.items()}
        return parameters

    def task(x: torch.Tensor, y: torch.Tensor, new_x: torch.Tensor, new_y: torch.Tensor):
        return loss_of(adapted(dict(model.named_parameters()), x, y), new_x, new_y)

    while True:
        height = torch.rand(TASKS, 1, 1, generator=g) * 4.9 + 0.1
        phase = torch.rand(TASKS, 1, 1, generator=g) * 3.14
        x = torch.rand(TASKS, 2 * SHOTS, 1, generator=g) * 10 - 5
        y = height * torch.sin(x - phase)
        (x, new_x), (y, new_y) = (t.to(device).split(SHOTS, dim=1) for t in (x, y))
        loss = vmap(task)(x, y, new_x, new_y).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
