"""Softmax, log_softmax and their gradients against the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from tpu_core.lowering import softmax  # noqa: F401

from .harness import CompareLowerings, check_opinfo

# The CPU's log_softmax subtracts in bfloat16 where the result is near 0: its error is one unit in
# the last place of the operands, not of the result.
LOG_SOFTMAX = {torch.bfloat16: (1.6e-2, 1e-2)}


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_opinfo(name: str) -> None:
    torch.manual_seed(0)
    mode = check_opinfo(
        name,
        dtypes=(torch.float32, torch.bfloat16, torch.float64),
        samples=5,
        check_width=True,
        tolerance=LOG_SOFTMAX if name == "log_softmax" else None,
    )
    assert not mode.failures, "\n".join(mode.failures)
    assert {f"aten._{name}.default", f"aten._{name}_backward_data.default"} <= mode.seen


def _check(call) -> CompareLowerings:
    with CompareLowerings() as mode:
        call()
    assert not mode.failures, "\n".join(mode.failures)
    return mode


def test_rows_of_infinities_and_large_values() -> None:
    inf = math.inf
    x = torch.tensor([[-inf, -inf, -inf], [inf, 1, 2], [1e30, -1e30, 0], [-inf, 0, 1]])
    _check(lambda: (torch.softmax(x, 1), torch.log_softmax(x, 1), torch.softmax(x, 0)))
    mode = _check(lambda: torch.ops.aten._safe_softmax(x, 1))
    assert "aten._safe_softmax.default" in mode.seen


def test_empty_and_zero_dimensional() -> None:
    def run() -> None:
        for f in (torch.softmax, torch.log_softmax):
            f(torch.zeros(0, 3), 0)
            f(torch.zeros(0, 3), 1)
            f(torch.tensor(2.0), 0)
            f(torch.tensor(2.0), -1)

    _check(run)


@pytest.mark.parametrize(("mask_type", "shape"), [(0, (3, 3)), (1, (2, 3)), (2, (2, 2, 3, 3))])
def test_masked_softmax(mask_type: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    x, mask = torch.randn(2, 2, 3, 3), torch.rand(shape) < 0.4
    mask.view(-1, shape[-1])[0] = True  # a row without any element
    mode = _check(lambda: torch.ops.aten._masked_softmax(x, mask, 3, mask_type))
    assert "aten._masked_softmax.default" in mode.seen


def test_masked_softmax_backward() -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 5, requires_grad=True)
    mask = torch.rand(4, 5) < 0.4
    mode = _check(lambda: torch.ops.aten._masked_softmax(x, mask, 1, 2).backward(torch.randn(4, 5)))
    assert "aten._masked_softmax_backward.default" in mode.seen
