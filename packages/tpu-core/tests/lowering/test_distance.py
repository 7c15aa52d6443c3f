"""Pairwise distances against the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from lowering.harness import CompareLowerings
from tpu_core.lowering import distance  # noqa: F401

NORMS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf]


@pytest.mark.parametrize("p", NORMS)
def test_cdist(p: float) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 3, requires_grad=True), torch.randn(2, 5, 3, requires_grad=True)
    with torch.no_grad():
        y[0, 0] = x[0, 0]  # distance 0
    mode = CompareLowerings(check_width=True)
    with mode:
        torch.cdist(x, y, p=p).sum().backward()
    assert not mode.failures, mode.failures
    assert mode.seen >= {"aten._cdist_forward.default", "aten._cdist_backward.default"}


@pytest.mark.parametrize("p", NORMS)
def test_pdist(p: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3, requires_grad=True)
    with torch.no_grad():
        x[1] = x[0]
    mode = CompareLowerings(check_width=True)
    with mode:
        torch.pdist(x, p=p).sum().backward()
    assert not mode.failures, mode.failures
    assert mode.seen >= {"aten._pdist_forward.default", "aten._pdist_backward.default"}


def test_many_rows_broadcast_and_empty() -> None:
    # A distance from a difference of squares keeps half of the digits.
    mode = CompareLowerings(tolerance={torch.float32: (1e-3, 1e-3)})
    with mode, torch.no_grad():
        torch.cdist(torch.randn(30, 4), torch.randn(2, 27, 4))
        torch.cdist(torch.randn(3, 4), torch.randn(2, 4), compute_mode="use_mm_for_euclid_dist")
        never = "donot_use_mm_for_euclid_dist"
        torch.cdist(torch.randn(30, 4), torch.randn(27, 4), compute_mode=never)
        torch.cdist(torch.randn(3, 0), torch.randn(2, 0))
        torch.cdist(torch.randn(0, 4), torch.randn(2, 4))
        torch.pdist(torch.randn(1, 4))
    assert not mode.failures, mode.failures
