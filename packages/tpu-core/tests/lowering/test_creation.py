"""Constants, ranges, copies and changes of dtype against the CPU."""

from __future__ import annotations

import pytest
import torch

from tpu_core import lowering

from .harness import CompareLowerings, check_opinfo

lowering.load()

OPS = {
    "fill": "fill.Scalar",
    "full": "full.default",
    "full_like": "full_like.default",
    "new_full": "new_full.default",
    "zeros": "zeros.default",
    "zeros_like": "zeros_like.default",
    "new_zeros": "new_zeros.default",
    "ones": "ones.default",
    "ones_like": "ones_like.default",
    "new_ones": "new_ones.default",
    "scalar_tensor": "scalar_tensor.default",
    "clone": "clone.default",
    "float": "_to_copy.default",
    "arange": "arange.start_step",
    "linspace": "linspace.default",
    "logspace": "logspace.default",
    "eye": "eye.default eye.m",
    "tril": "tril.default",
    "triu": "triu.default",
    "tril_indices": "tril_indices.default",
    "triu_indices": "triu_indices.default",
}
# Integer linspace and logspace count in float64, as the CPU does, or they miss whole numbers.
WIDE = {"linspace", "logspace"}
# The CPU rounds each step of a bfloat16 or float32 range, the lowering only the result.
RANGES = {torch.bfloat16: (2e-2, 2e-2), torch.float32: (1e-5, 1e-5)}


@pytest.mark.parametrize("name", OPS)
def test_opinfo(name: str) -> None:
    options = {"check_width": name not in WIDE, "tolerance": RANGES if name in WIDE else {}}
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    mode = check_opinfo(name, dtypes=dtypes, samples=6, **options)
    assert not mode.failures
    assert {f"aten.{op}" for op in OPS[name].split()} <= mode.seen


def compare(fn, *args, **options) -> set[str]:
    mode = CompareLowerings(**options)
    with mode:
        fn(*args)
    assert not mode.failures
    return mode.seen


@pytest.mark.parametrize("lift", [True, False])
def test_arange(lift: bool) -> None:
    aten = torch.ops.aten
    for dtype in (None, torch.float32, torch.bfloat16, torch.int32, torch.float64):
        compare(lambda d=dtype: torch.arange(7, dtype=d), lift=lift)
        compare(lambda d=dtype: torch.arange(-3, 4, dtype=d), lift=lift)
        compare(lambda d=dtype: torch.arange(10, -10, -3, dtype=d), lift=lift)
    compare(lambda: torch.arange(0.5, 3.0, 0.25), lift=lift)
    compare(aten.arange.start, 2**40, 2**40 + 3, lift=lift)
    compare(aten.range.step, 0, 5, 2, lift=lift)
    compare(lambda: (torch.arange(0), torch.arange(3.5)), lift=lift)


def test_ranges_of_tensors() -> None:
    a, b = torch.tensor(1.0), torch.tensor(4.0)
    compare(lambda: (torch.linspace(a, 5, 7), torch.linspace(0, b, 7), torch.linspace(a, b, 1)))
    compare(lambda: (torch.logspace(a, 2, 4), torch.logspace(0, b, 4, 2), torch.logspace(a, b, 3)))


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_integer_logspace_between_fractions(steps: int) -> None:
    compare(lambda: torch.logspace(1.5, 4.7, steps, 3.0, dtype=torch.int64))
    compare(lambda: torch.linspace(1.5, 4.7, steps, dtype=torch.int64))


@pytest.mark.parametrize("source", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float64, torch.uint8, torch.bfloat16, torch.bool])
def test_copies_cast_and_broadcast(source: torch.dtype, target: torch.dtype) -> None:
    src = torch.tensor([0, 1, 3]).to(source)
    seen = compare(lambda: torch.ops.aten.copy.default(torch.zeros(2, 3, dtype=target), src))
    assert "aten.copy.default" in seen
    assert "aten._to_copy.default" in compare(lambda: src.to(target, copy=True))


def test_fill() -> None:
    fill = torch.ops.aten.fill
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool):
        x = torch.ones(2, 3).to(dtype)
        compare(fill.Scalar, x, 3)
        compare(fill.Tensor, x, torch.tensor(2.5))
        compare(torch.ops.aten.zero.default, x)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 4, 4), (0, 3)])
def test_triangles(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for diagonal in (-9, -2, 0, 1, 9):
        compare(lambda d=diagonal: (x.tril(d), x.triu(d)))
    rows, columns = shape[-2:]
    for offset in (-4, -1, 0, 2, 6):
        compare(torch.tril_indices, rows, columns, offset)
        compare(torch.triu_indices, rows, columns, offset)
