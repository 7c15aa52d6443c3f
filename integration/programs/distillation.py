"""Distillation of a frozen teacher: hooks for its features, KL of softened logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

CLASSES, TEMPERATURE = 10, 3.0


def network(width: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1)]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def run(device: str) -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    teacher = network(48, 3).to(device).eval().requires_grad_(False)
    student, bridge = network(16, 2).to(device), nn.Linear(16, 48).to(device)
    features: dict[str, torch.Tensor] = {}

    def keep(name: str):
        return lambda module, inputs, output: features.update({name: output})

    teacher[-2].register_forward_hook(keep("teacher"))
    student[-2].register_forward_hook(keep("student"))
    optimizer = torch.optim.AdamW([*student.parameters(), *bridge.parameters()], lr=2e-3)
    while True:
        x = torch.randn(24, 3, 24, 24, generator=g).to(device)
        y = torch.randint(CLASSES, (24,), generator=g).to(device)
        with torch.no_grad():
            wanted = teacher(x)
        logits = student(x)
        soft = F.kl_div(
            F.log_softmax(logits / TEMPERATURE, 1),
            F.log_softmax(wanted / TEMPERATURE, 1),
            reduction="batchmean",
            log_target=True,
        )
        hint = 1 - F.cosine_similarity(bridge(features["student"]), features["teacher"]).mean()
        loss = TEMPERATURE**2 * soft + 0.1 * F.cross_entropy(logits, y) + hint
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()
