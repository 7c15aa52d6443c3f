"""Sums, products, quotients, remainders and powers against the CPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tpu_core import lowering

from .harness import CompareLowerings, check_opinfo

lowering.load()

OTHERS = (torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
# x**y is exp(y log x) in XLA and a few ulp worse in complex64 than the CPU's.
COMPLEX_POWER = {torch.complex64: (1e-5, 1e-5)}
OPS = {
    "add": "add.Tensor",
    "sub": "sub.Tensor",
    "rsub": "rsub.Tensor",
    "mul": "mul.Tensor",
    "div": "div.Tensor div.Tensor_mode",
    "floor_divide": "floor_divide.default",
    "remainder": "remainder.Tensor",
    "fmod": "fmod.Tensor",
    "pow": "pow.Tensor_Tensor",
}


@pytest.mark.parametrize("name", OPS)
def test_opinfo(name: str) -> None:
    mode = check_opinfo(name, samples=3, check_width=True)
    assert not mode.failures
    assert {f"aten.{op}" for op in OPS[name].split()} <= mode.seen
    options = {"tolerance": COMPLEX_POWER, "check_width": True}
    assert not check_opinfo(name, dtypes=OTHERS, samples=2, grad=False, **options).failures


def compare(fn, *args, **options) -> set[str]:
    mode = CompareLowerings(check_width=True, **options)
    with mode:
        fn(*args)
    assert not mode.failures
    return mode.seen


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.0, 1e30]
PAIRS = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)))
BINARY = {
    "div.Tensor": torch.div,
    "div.Tensor_mode": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor_divide.default": torch.floor_divide,
    "remainder.Tensor": torch.remainder,
    "fmod.Tensor": torch.fmod,
    "pow.Tensor_Tensor": torch.pow,
}


@pytest.mark.parametrize("op", BINARY)
def test_special_values(op: str) -> None:
    assert compare(BINARY[op], PAIRS[:, 0].clone(), PAIRS[:, 1].clone()) == {f"aten.{op}"}


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
@pytest.mark.parametrize("op", BINARY)
def test_integers_round_and_wrap(op: str, dtype: torch.dtype) -> None:
    values = [-128, -7, -3, -1, 1, 2, 3, 7, 127]
    pairs = torch.tensor(list(itertools.product(values, values)), dtype=dtype)
    if op == "pow.Tensor_Tensor":
        pairs[:, 1] %= 70  # larger exponents than bits
    else:
        pairs = pairs[(pairs[:, 0] != -128) | (pairs[:, 1] != -1)]  # traps on the CPU
    compare(BINARY[op], pairs[:, 0].clone(), pairs[:, 1].clone())


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 7, 0.5, -0.5, -1, -2, 2.5, 1 + 2j])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_constant_exponents(dtype: torch.dtype, exponent: complex) -> None:
    integral = not dtype.is_floating_point
    if integral and isinstance(exponent, int) and exponent < 0:
        return  # refused by PyTorch
    if dtype == torch.bfloat16 and isinstance(exponent, complex) and hasattr(torch, "bcomplex32"):
        return  # refused by torch 2.15, where the result is complex of bfloat16
    x = torch.tensor([0, 1, 2, 5]).to(dtype)
    seen = compare(lambda: torch.pow(x, exponent), tolerance=COMPLEX_POWER)
    assert "aten.pow.Tensor_Scalar" in seen


def test_square_root_of_infinities() -> None:
    x = torch.tensor([-math.inf, math.inf, -1.0, -0.0])
    compare(lambda: (x**0.5, x**-0.5))


def test_number_operands() -> None:
    """Wrapped numbers promote less than tensors, and keep float32 precision next to bfloat16."""
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        x = torch.arange(1, 7).to(dtype)
        for number in (3, 0.1, -2.7):
            for lift in (True, False):
                compare(lambda x, n: (x + n, n - x, x * n, x / n, n / x), x, number, lift=lift)
                compare(lambda x, n: (x // n, x % n, torch.fmod(x, n), n % x), x, number, lift=lift)
                compare(lambda x, n: torch.add(x, x, alpha=2), x, number, lift=lift)
        compare(lambda x: (torch.pow(2, x), torch.pow(0.5, x)), x)


@pytest.mark.parametrize(
    "op", ["add.Scalar", "sub.Scalar", "rsub.Scalar", "mul.Scalar", "div.Scalar"]
)
def test_scalar_overloads(op: str) -> None:
    name, overload = op.split(".")
    fn = getattr(getattr(torch.ops.aten, name), overload)
    assert compare(fn, torch.randn(3, 4), 0.3) == {f"aten.{op}"}
    assert compare(fn, torch.arange(4), 3) == {f"aten.{op}"}


def test_scalar_modes() -> None:
    x = torch.tensor([-7.5, 3.0, 8.0])
    for mode in (None, "floor", "trunc"):
        compare(lambda mode=mode: torch.ops.aten.div.Scalar_mode(x, 2, rounding_mode=mode))
    compare(torch.ops.aten.floor_divide.Scalar, x, 2)
    compare(torch.ops.aten.remainder.Scalar, x, 2)
    compare(torch.ops.aten.remainder.Scalar_Tensor, 5, x)
    compare(torch.ops.aten.fmod.Scalar, x, 2)


def test_bool_operands() -> None:
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    compare(lambda: (a + b, a * b, a / b.logical_not(), a + 1, a * 0.5))


def test_empty_and_zero_dim() -> None:
    for shape in ((), (0,), (2, 0, 3)):
        x = torch.ones(shape)
        compare(lambda x=x: (x + x, x * 2, x / x, x // x, x % x, x**2, x**x, x - 1))


def test_a_broadcast_divisor_divides() -> None:
    x = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    there = x.to("tpu")
    for quotient in (
        lambda x: x / x.amax(1, keepdim=True),
        lambda x: x[:, :, None] / x[:, None],
        lambda x: x / x[0],
        lambda x: torch.div(x, x[:, :1], rounding_mode="floor"),
    ):
        assert torch.equal(quotient(there).cpu(), quotient(x))
    assert torch.floor(there / there.amax(1, keepdim=True)).amax(1).sum().item() == 64
