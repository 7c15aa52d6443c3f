"""Grid sampling and its gradients against the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowering.harness import CompareLowerings
from tpu_core.lowering import grid_sampler  # noqa: F401

CASES = [
    (rank, mode, padding)
    for rank, mode, padding in itertools.product((2, 3), (0, 1, 2), (0, 1, 2))
    if (rank, mode) != (3, 2)
]


@pytest.mark.parametrize(("rank", "mode", "padding"), CASES)
def test_grid_sampler(rank: int, mode: int, padding: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, *(4, 5, 3)[:rank], requires_grad=True)
    # Some points lie outside the input, some far outside.
    grid = (torch.randn(2, *(3, 4, 2)[:rank], rank) * 1.5).requires_grad_()
    sampler = getattr(torch, f"grid_sampler_{rank}d")
    # Sums of a cubic's sixteen terms, and slopes, in another order.
    mode_ = CompareLowerings(check_width=True, tolerance={torch.float32: (1e-4, 2e-5)})
    with mode_:
        for align_corners in (False, True):
            y = sampler(x, grid, mode, padding, align_corners)
            y.backward(torch.randn_like(y))
    assert not mode_.failures, mode_.failures
    name = f"aten.grid_sampler_{rank}d"
    assert mode_.seen >= {f"{name}.default", f"{name}_backward.default"}


def test_nan_and_infinite_points_do_not_fail() -> None:
    x = torch.randn(1, 1, 4, 4)
    grid = torch.zeros(1, 1, 3, 2)
    grid[0, 0, 0, 0], grid[0, 0, 1, 1] = torch.inf, -torch.inf
    mode = CompareLowerings()
    with mode:
        torch.grid_sampler_2d(x, grid, 1, 0, False)
        torch.grid_sampler_2d(x, grid, 0, 1, False)
    assert not mode.failures, mode.failures


def test_a_padding_mode_that_there_is_not_moves_no_point() -> None:
    x, grid = torch.randn(1, 1, 3, 3, 3), torch.randn(1, 4, 4, 4, 3) * 2
    expected = torch.grid_sampler_3d(x, grid, 1, -1, False)
    sampled = torch.grid_sampler_3d(x.to("tpu"), grid.to("tpu"), 1, -1, False)
    assert torch.equal(sampled.cpu(), expected)


def test_only_the_gradients_asked_for() -> None:
    x, grid = torch.randn(1, 1, 4, 4), torch.zeros(1, 3, 3, 2, requires_grad=True)
    mode = CompareLowerings()
    with mode:
        torch.grid_sampler_2d(x, grid, 0, 0, False).sum().backward()
    assert not mode.failures, mode.failures
    assert "aten.grid_sampler_2d_backward.default" in mode.seen
