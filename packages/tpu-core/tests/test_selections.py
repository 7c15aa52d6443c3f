"""Gradients that find a maximum by equality, and places of maxima, whatever XLA computes twice.

Other tests compile without LLVM's optimizations, which round products and sums at once: these run
themselves again with them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda y: y.amax(1),
    "amin": lambda y: y.amin((0, 1)),
    "max": lambda y: y.max(),
    # Without a derivative in torch 2.11.
    **({} if IS_OLD else {"aminmax": lambda y: sum(torch.aminmax(y, dim=1))}),
    "median": lambda y: y.median(),
    "norm": lambda y: torch.linalg.vector_norm(y, float("inf"), 1),
    "scatter_reduce": lambda y: y.scatter_reduce(
        1, torch.zeros(y.shape, dtype=torch.int64, device=y.device), y, "amax"
    ),
    "mask": lambda y: y * (y == y.amax(1, keepdim=True)),
}


def computed(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """What XLA rounds one way in a loop over it and another in a reduction."""
    return torch.sigmoid(x) * torch.tanh(x * scale) + shift


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in [(64, 50, 6), (6,), (6,)]]


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("keeps", [True, False])
def test_gradients(name: str, keeps: bool) -> None:
    def gradient(device: str) -> Tensor:
        x, *others = (t.to(device) for t in operands())
        y = computed(x.requires_grad_(), *others)
        result = REDUCTIONS[name](y)
        if not keeps:
            del y
        (
            result * torch.linspace(0.5, 1, result.numel(), device=device).view(result.shape)
        ).sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    torch.testing.assert_close(gradient("tpu"), gradient("cpu"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", [torch.cummax, torch.cummin])
def test_places_of_running_extremes(op: Callable[..., tuple[Tensor, Tensor]]) -> None:
    x, scale, shift = (t.to("tpu") for t in operands())
    y = computed(x, scale, shift)
    values, places = op(y, 1)
    assert y.gather(1, places).cpu().equal(values.cpu())


def test_places_of_pooled_maxima() -> None:
    x, scale, shift = (t.to("tpu") for t in operands())
    y = computed(x, scale, shift).transpose(1, 2)
    values, places = torch.nn.functional.adaptive_max_pool1d(y, 5, return_indices=True)
    assert y.gather(2, places).cpu().equal(values.cpu())


def test_optimized_programs() -> None:
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__)
    done = subprocess.run(
        (*command, "-k", "not optimized"),
        env=os.environ | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
