"""Max and average pooling over fixed windows against the CPU."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lowering.harness import CompareLowerings, check_opinfo
from tpu_core.lowering import pooling

# The CPU sums overlapping windows' gradients in bfloat16, the lowering in float32.
TOLERANCE = {torch.bfloat16: (5e-2, 5e-2)}
OPINFO = {
    "nn.functional.max_pool1d": "aten.max_pool2d_with_indices",
    "nn.functional.max_pool2d": "aten.max_pool2d_with_indices",
    "nn.functional.max_pool3d": "aten.max_pool3d_with_indices",
    "nn.functional.avg_pool1d": "aten.avg_pool2d",
    "nn.functional.avg_pool2d": "aten.avg_pool2d",
    "nn.functional.avg_pool3d": "aten.avg_pool3d",
}


@pytest.mark.parametrize("name", OPINFO)
def test_opinfo(name: str) -> None:
    torch.manual_seed(0)
    mode = check_opinfo(
        name, (torch.float32, torch.bfloat16), 1, tolerance=TOLERANCE, check_width=True
    )
    assert not mode.failures, mode.failures
    assert mode.seen >= {f"{OPINFO[name]}.default", f"{OPINFO[name]}_backward.default"}


MAX = {
    "ResNet stem": ((2, 3, 9, 8), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "ceil mode": ((1, 2, 8, 7), {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
    "dilation": ((1, 2, 9, 9), {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2}),
    "gaps": ((1, 2, 9, 9), {"kernel_size": 2, "stride": 4}),
    "large window": ((1, 2, 16, 16), {"kernel_size": 9, "stride": 4, "padding": 4}),
    "no channels": ((2, 3, 4, 4), {"kernel_size": (1, 2), "stride": (1, 2)}),
    "unbatched": ((2, 6, 6), {"kernel_size": 2}),
}


def _max_pool(x: torch.Tensor, **options) -> CompareLowerings:
    mode = CompareLowerings(check_width=True)
    x = x.clone().requires_grad_()
    with mode:
        y, _ = F.max_pool2d(x, return_indices=True, **options)
        y.backward(torch.randn_like(y))
    assert len(mode.seen) == 2
    return mode


@pytest.mark.parametrize("case", MAX)
def test_max_pool(case: str) -> None:
    shape, options = MAX[case]
    mode = _max_pool(torch.randn(shape), **options)
    assert not mode.failures, mode.failures


@pytest.mark.parametrize("kernel", [3, 7])
def test_max_pool_of_ties_infinities_and_nan(kernel: int) -> None:
    """The first maximum wins; NaN wins over all and the last one over the others."""
    x = torch.randint(0, 3, (1, 2, 14, 14)).float()
    x[:, :, 3:6, 2:9] = -torch.inf
    x[:, :, 9, 4] = torch.nan
    x[:, :, 10, 5] = torch.nan
    options = {"kernel_size": kernel, "stride": 2, "padding": kernel // 2}
    mode = _max_pool(x, **options)
    assert not mode.failures, mode.failures
    options["dilation"] = 1 if kernel > 3 else 2
    mode = _max_pool(torch.full((1, 1, 8, 8), -torch.inf), **options)
    assert not mode.failures, mode.failures


def test_max_pool_of_integers() -> None:
    mode = CompareLowerings()
    with mode:
        F.max_pool2d(torch.randint(-9, 9, (2, 2, 6, 6)), 3, 2, 1, return_indices=True)
    assert not mode.failures, mode.failures
    assert mode.seen


AVERAGE = {
    "overlap": ((2, 3, 9, 8), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "ceil mode": ((1, 2, 8, 7), {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
    "without padding": (
        (1, 2, 8, 7),
        {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
    ),
    "divisor": ((1, 2, 8, 7), {"kernel_size": 3, "divisor_override": 5}),
    "large window": ((1, 2, 16, 16), {"kernel_size": 8, "stride": 3, "padding": 2}),
}


@pytest.mark.parametrize("case", AVERAGE)
def test_avg_pool(case: str) -> None:
    shape, options = AVERAGE[case]
    x = torch.randn(shape, requires_grad=True)
    mode = CompareLowerings(check_width=True)
    with mode:
        y = F.avg_pool2d(x, **options)
        y.backward(torch.randn_like(y))
    assert not mode.failures, mode.failures
    assert len(mode.seen) == 2


def test_max_unpool() -> None:
    mode = CompareLowerings()
    x = torch.randn(2, 3, 4, 6, 8)
    with mode:
        y, i = F.max_pool2d(x[:, :, 0], 2, return_indices=True)
        F.max_unpool2d(y, i, 2, output_size=(6, 8))
        y, i = F.max_pool3d(x, 2, return_indices=True)
        F.max_unpool3d(y, i, 2)
    assert not mode.failures, mode.failures
    assert mode.seen >= {"aten.max_unpool2d.default", "aten.max_unpool3d.default"}


def test_gradient_of_a_small_window_needs_no_scatter() -> None:
    x = jax.ShapeDtypeStruct((1, 2, 8, 8), np.float32)
    w = pooling.Windows.of(x.shape, (4, 4), 2, [3], [2], [1])
    grad = jax.ShapeDtypeStruct((1, 2, 4, 4), np.float32)
    indices = jax.ShapeDtypeStruct((1, 2, 4, 4), np.int32)
    text = str(jax.make_jaxpr(lambda g, i: pooling.max_pool_backward(g, i, w))(grad, indices))
    assert "scatter" not in text
