"""``fused=True`` with a gradient scaler: a step whose gradients overflow changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn


def train(device: str, kind: type[torch.optim.Optimizer], **options: Any) -> list[torch.Tensor]:
    """Parameters after four steps, the second of which overflows."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4).to(device), torch.randn(5, 8).to(device)
    optimizer: Any = kind(model.parameters(), fused=True, **options)
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    for step in range(4):
        loss = model(x).square().mean() * (torch.inf if step == 1 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adam, {"lr": torch.tensor(0.01), "amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
        (torch.optim.Adagrad, {"lr": 0.01}),
    ],
)
def test_as_on_the_cpu(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    fallbacks = torch.tpu.metrics()["fallbacks"]
    for got, want in zip(train("tpu", kind, **options), train("cpu", kind, **options)):
        torch.testing.assert_close(got, want)
    assert torch.tpu.metrics()["fallbacks"] == fallbacks
