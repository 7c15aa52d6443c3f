"""Pruning of a trained network: masks by magnitude that grow, gradients held at zero."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = nn.Sequential(
        *(nn.Conv2d(1, 12, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 5), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24 * 16, 80), nn.ReLU(), nn.Linear(80, 10)),
    ).to(device)
    layers = [(m, "weight") for m in model if hasattr(m, "weight")]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    step = 0
    while True:
        if step % 8 == 4:
            prune.global_unstructured(layers, prune.L1Unstructured, amount=0.1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        x = torch.randn(32, 1, 28, 28, generator=g)
        y = (x[:, 0, :10].mean((1, 2)) * 60).long().clamp(-5, 4) + 5
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        zeros = sum(int((m.weight == 0).sum()) for m, _ in layers)
        yield loss.item() + zeros / sum(m.weight.nelement() for m, _ in layers)
