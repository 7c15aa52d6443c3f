"""Rotary embeddings of models as they are written move no more memory than they need, on a TPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tpu_compile


def halves(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


class Rotary(torch.nn.Module):
    """The embedding, and the gradient of its input."""

    def __init__(self, rotated: Any) -> None:
        super().__init__()
        self.rotated = rotated

    def forward(
        self, x: torch.Tensor, grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> list[torch.Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x * cos + self.rotated(x) * sin
            return [y.detach(), *torch.autograd.grad(y, x, grad)]


TOPOLOGIES = ("v5e:1x1", "v4:1x1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1")


@pytest.mark.parametrize("rotated", [halves, neighbours])
@pytest.mark.parametrize(
    "topology", [pytest.param(t, marks=[pytest.mark.slow] * (t != "v5e:1x1")) for t in TOPOLOGIES]
)
def test_rows_move_once(rotated: Any, topology: str) -> None:
    heads, row = (
        torch.empty(1, 16, 2048, 128, dtype=torch.bfloat16, device="meta"),
        torch.empty(2048, 128, dtype=torch.bfloat16, device="meta"),
    )
    plan = tpu_compile.aot(Rotary(rotated), (heads, heads, row, row), topology=topology, batch=None)
    assert plan.cost is not None
    # Input, gradient and both results, and the angles, which both passes may read.
    least = 4 * heads.numel() * 2 + 4 * row.numel() * 2
    assert plan.cost.hbm_bytes <= 1.1 * least
