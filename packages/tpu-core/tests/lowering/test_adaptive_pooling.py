"""Adaptive and fractional pooling against the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lowering.harness import CompareLowerings, check_opinfo
from tpu_core.lowering import adaptive_pooling  # noqa: F401

# The CPU sums in bfloat16 where windows overlap; the lowering sums in float32.
TOLERANCE = {torch.bfloat16: (5e-2, 5e-2)}
OPINFO = {
    "nn.functional.adaptive_avg_pool2d": "aten._adaptive_avg_pool2d",
    "nn.functional.adaptive_avg_pool3d": "aten._adaptive_avg_pool3d",
    "nn.functional.adaptive_max_pool2d": "aten.adaptive_max_pool2d",
    "nn.functional.adaptive_max_pool3d": "aten.adaptive_max_pool3d",
    "nn.functional.fractional_max_pool2d": "aten.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d": "aten.fractional_max_pool3d",
}


@pytest.mark.parametrize("name", OPINFO)
def test_opinfo(name: str) -> None:
    torch.manual_seed(0)
    # Each op of a lowering compiles on its own here, so few samples; a 3-D average's first ones
    # are global, which PyTorch computes as a mean.
    samples = 3 if name.endswith("adaptive_avg_pool3d") else 1
    mode = check_opinfo(name, (torch.float32, torch.bfloat16), samples, tolerance=TOLERANCE)
    assert not mode.failures, mode.failures
    assert mode.seen >= {f"{OPINFO[name]}.default", f"{OPINFO[name]}_backward.default"}


@pytest.mark.parametrize("outputs", [(1, 1), (2, 4), (3, 5), (11, 3), (0, 2)])
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_sizes(kind: str, outputs: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    mode = CompareLowerings(check_width=True)
    function = {"avg": torch._adaptive_avg_pool2d, "max": F.adaptive_max_pool2d_with_indices}[kind]
    with mode:
        y = function(x, outputs)
        y = y[0] if kind == "max" else y
        if y.numel():  # PyTorch refuses a gradient of nothing
            y.backward(torch.randn_like(y))
    assert not mode.failures, mode.failures
    assert len(mode.seen) == (2 if y.numel() else 1)


def test_max_of_ties_and_nan() -> None:
    x = torch.randint(0, 2, (1, 1, 7, 7)).float()
    x[..., 2, 2] = torch.nan
    x[..., 3, 1] = torch.nan
    x[..., 5:, 5:] = -torch.inf
    mode = CompareLowerings()
    with mode:
        F.adaptive_max_pool2d_with_indices(x, (3, 3))
        F.adaptive_max_pool2d_with_indices(x, (1, 7))
    assert not mode.failures, mode.failures


def test_average_keeps_infinity_in_its_window() -> None:
    x = torch.zeros(1, 1, 1, 7)
    x[..., 0] = torch.inf
    mode = CompareLowerings()
    with mode:
        torch._adaptive_avg_pool2d(x, (1, 3))
    assert not mode.failures, mode.failures
