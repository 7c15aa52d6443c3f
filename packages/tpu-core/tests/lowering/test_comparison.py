"""Comparisons, predicates, logical and bitwise ops against the CPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tpu_core import lowering

from .harness import CompareLowerings, check_opinfo

lowering.load()

COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
OTHERS = """logical_and logical_or logical_xor logical_not isnan isinf isposinf isneginf signbit
bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift
isin""".split()
TENSORS = (*COMPARISONS, "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift",
           "bitwise_right_shift")  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)


@pytest.mark.parametrize("name", COMPARISONS + OTHERS)
def test_opinfo(name: str) -> None:
    mode = check_opinfo(name, dtypes=DTYPES, samples=2, grad=False, check_width=True)
    assert not mode.failures
    overload = "Tensor" if name in TENSORS else "Tensor_Tensor" if name == "isin" else "default"
    assert f"aten.{name}.{overload}" in mode.seen


def compare(fn, *args) -> set[str]:
    mode = CompareLowerings(check_width=True)
    with mode:
        fn(*args)
    assert not mode.failures
    return mode.seen


VALUES = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.1]


def test_special_values() -> None:
    pairs = torch.tensor(list(itertools.product(VALUES, VALUES)))
    a, b = pairs[:, 0].clone(), pairs[:, 1].clone()
    for name in (*COMPARISONS, "logical_and", "logical_or", "logical_xor"):
        compare(getattr(torch, name), a, b)
    for name in ("isnan", "isinf", "isposinf", "isneginf", "signbit", "logical_not"):
        compare(getattr(torch, name), a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
@pytest.mark.parametrize("number", [0.1, 1, True])
def test_numbers_are_promoted(dtype: torch.dtype, number: float) -> None:
    x = torch.tensor([0.0, 0.1, 1.0, 2.0]).to(dtype)
    for name in COMPARISONS:
        assert compare(getattr(torch, name), x, number) == {f"aten.{name}.Scalar"}
    compare(torch.eq, x, torch.tensor(0.1, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_shifts_out_of_range(dtype: torch.dtype) -> None:
    x = torch.tensor([1, 3, 100, 127]).to(dtype) * (1 if dtype == torch.uint8 else -1)
    for bits in (0, 1, 7, 8, 63, 64, 100):
        other = torch.full_like(x, bits)
        compare(lambda o=other: (x << o, x >> o))
        compare(torch.ops.aten.bitwise_left_shift.Tensor_Scalar, x, bits)
        compare(torch.ops.aten.bitwise_right_shift.Tensor_Scalar, x, bits)
    compare(torch.ops.aten.bitwise_left_shift.Scalar_Tensor, 3, x.abs() % 8)
    compare(torch.ops.aten.__lshift__.Scalar, x, 2)
    compare(torch.ops.aten.__rshift__.Tensor, x, torch.full_like(x, 2))


@pytest.mark.parametrize("name", ["and", "or", "xor"])
def test_bitwise_numbers(name: str) -> None:
    packet = getattr(torch.ops.aten, f"bitwise_{name}")
    x = torch.tensor([0, 5, -7])
    assert compare(packet.Scalar, x, 6) == {f"aten.bitwise_{name}.Scalar"}
    assert compare(packet.Scalar_Tensor, 6, x) == {f"aten.bitwise_{name}.Scalar_Tensor"}
    compare(packet.Scalar, x > 0, True)


def test_isin_overloads() -> None:
    x = torch.tensor([[1, 2], [3, 4]])
    compare(lambda: (torch.isin(x, 2), torch.isin(3, x), torch.isin(x, x[0], invert=True)))
    compare(lambda: torch.isin(x, torch.tensor([], dtype=torch.int64)))
