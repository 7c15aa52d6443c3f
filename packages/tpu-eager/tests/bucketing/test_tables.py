"""Ops with constant arrays that follow from sizes, at sizes that vary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from against_cpu import value_and_gradients
from compile_counts import compiles
from tpu_core import modes
from tpu_core.lowering import tables

Function = Callable[[torch.Tensor], torch.Tensor]

pytestmark = pytest.mark.usefixtures("signatures")


@pytest.fixture(autouse=True)
def fused():
    with modes.using("fused"):
        yield


def interpolate(**options: object) -> Function:
    return lambda x: F.interpolate(x, **options)


def interpolated_grid(x: torch.Tensor, **options: object) -> torch.Tensor:
    grid = x.mean((2, 3), keepdim=True) * torch.linspace(0, 2, 24, device=x.device).view(4, 6)
    return x * F.interpolate(grid, size=x.shape[-2:], **options)


FUNCTIONS: dict[str, Function] = {
    "bilinear": interpolate(scale_factor=2, mode="bilinear"),
    "bilinear, corners aligned": interpolate(scale_factor=2, mode="bilinear", align_corners=True),
    "bicubic": interpolate(scale_factor=3, mode="bicubic"),
    "nearest, to three halves": interpolate(scale_factor=1.5),
    "nearest exact": interpolate(scale_factor=1.5, mode="nearest-exact"),
    "half, antialiased": interpolate(scale_factor=0.5, mode="bilinear", antialias=True),
    "to the size of another": lambda x: (
        x + F.interpolate(F.avg_pool2d(x, 2), size=x.shape[-2:], mode="bilinear")
    ),
    "a crop to a fixed size": lambda x: F.interpolate(x[..., 1:, 2:], size=(5, 6), mode="bilinear"),
    "a crop to the nearest": lambda x: F.interpolate(x[..., 1:, 2:], size=(5, 7)),
    "adaptive pooling": lambda x: F.adaptive_avg_pool2d(x[..., 1:, 1:], (5, 7)),
    # Some of the sizes are multiples of the grid's or equal to it, and most are not.
    "a fixed grid, bicubic": lambda x: interpolated_grid(x, mode="bicubic"),
    "a fixed grid, bilinear": lambda x: interpolated_grid(x, mode="bilinear"),
    "a fixed grid, nearest": lambda x: interpolated_grid(x),
    "to a fixed size, antialiased": interpolate(size=(7, 9), mode="bicubic", antialias=True),
    "even and uneven averages": lambda x: F.adaptive_avg_pool2d(x, (4, 6)),
    "even and uneven maxima": lambda x: F.adaptive_max_pool2d(x, (4, 6)),
    "maxima of halves": lambda x: F.adaptive_max_pool2d(x, [n // 2 for n in x.shape[-2:]]),
    "averages of halves": lambda x: F.adaptive_avg_pool2d(x, [n // 2 for n in x.shape[-2:]]),
    "of a fixed size, in varying batches": lambda x: F.interpolate(
        x.mean((2, 3), keepdim=True) * torch.ones(5, 7, device=x.device),
        size=(9, 11),
        mode="bicubic",
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_program_serves_sizes(name: str) -> None:
    function = FUNCTIONS[name]
    sizes = [
        (2, 12, 20),
        (3, 16, 24),
        (2, 20, 12),
        (4, 28, 16),
        (3, 24, 28),
        (2, 12, 32),
        (3, 32, 12),
    ]

    def step(i: int) -> None:
        n, h, w = sizes[i]
        x = torch.randn(n, 3, h, w)
        here, there = (value_and_gradients(function, [x], d) for d in ("cpu", "tpu"))
        torch.testing.assert_close(there, here, rtol=1e-4, atol=2e-5)

    assert compiles(step, range(len(sizes))) <= 5


def test_indices_of_a_triangle() -> None:
    def step(n: int) -> None:
        x = torch.randn(n, n + 2)
        found = []
        for given in (x, x.to("tpu")):
            row, column = torch.tril_indices(*given.shape, offset=1, device=given.device)
            found.append((given[row, column] * 2).cpu())
        torch.testing.assert_close(*found)

    assert compiles(step, (5, 7, 6, 9, 13, 8, 11)) <= 3


def test_others_take_the_place_of_tables() -> None:
    with tables.collected() as made:
        first = tables.table([1, 2], "int32")
    assert made[0].tolist() == first.tolist() == [1, 2]
    with tables.replaced(iter([first])):
        assert tables.table([3, 4, 5], "int32") is first
        with pytest.raises(LookupError, match="more tables"):
            tables.table([6], "int32")
