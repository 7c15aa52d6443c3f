"""Elementary functions against the CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tpu_core import lowering

from .harness import CompareLowerings, check_opinfo

lowering.load()

UNARY = """abs acos acosh angle asin asinh atan atanh ceil conj_physical cos cosh deg2rad exp exp2
expm1 floor frac frexp log log10 log1p log2 logit nan_to_num neg rad2deg reciprocal round rsqrt sgn
sigmoid sign sin sinc sinh sqrt tan tanh trunc""".split()
BINARY = """atan2 copysign fmax fmin gcd heaviside hypot lcm ldexp logaddexp logaddexp2 maximum
minimum nextafter xlogy""".split()
OVERLOADS = {
    "conj_physical": "_conj_physical.default",
    "copysign": "copysign.Tensor",
    "frexp": "frexp.Tensor",
    "ldexp": "ldexp.Tensor",
    "xlogy": "xlogy.Tensor",
}
OTHERS = (torch.bfloat16, torch.int64, torch.bool, torch.complex64)
# The CPU evaluates these in bfloat16 step by step, the lowering in float32.
STEPWISE = {torch.bfloat16: (5e-2, 1e-2)}


@pytest.mark.parametrize("name", UNARY + BINARY)
def test_opinfo(name: str) -> None:
    mode = check_opinfo(name, samples=2, check_width=True)
    assert not mode.failures
    options = {"tolerance": STEPWISE if name == "logit" else {}, "check_width": True}
    other = check_opinfo(name, dtypes=OTHERS, samples=1, grad=False, **options)
    assert not other.failures
    assert f"aten.{OVERLOADS.get(name, f'{name}.default')}" in mode.seen | other.seen


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.0, 100.0, 1e30]


def compare(fn, *args) -> None:
    mode = CompareLowerings(check_width=True)
    with mode:
        fn(*args)
    assert not mode.failures
    assert mode.seen


@pytest.mark.parametrize("name", [n for n in UNARY if n != "conj_physical"])
def test_special_values(name: str) -> None:
    compare(getattr(torch, name), torch.tensor(SPECIAL))


@pytest.mark.parametrize("name", [n for n in BINARY if n not in ("gcd", "lcm")])
def test_pairs_of_special_values(name: str) -> None:
    pairs = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)))
    compare(getattr(torch, name), pairs[:, 0].clone(), pairs[:, 1].clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two_are_exact(dtype: torch.dtype) -> None:
    """Whole numbers come out whole: code takes floor(log2(n))."""
    exponents = torch.arange(-20, 60, dtype=dtype)
    tens = 10.0 ** torch.arange(0, 11, dtype=dtype)  # exact in float32
    exact = {dtype: (0.0, 0.0)}
    with (mode := CompareLowerings(tolerance=exact)):
        torch.exp2(exponents)
        torch.ldexp(torch.tensor(3.0, dtype=dtype), exponents)
        torch.log2(2.0**exponents)
        torch.log10(tens)
    assert not mode.failures


MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "boolean": lambda x, m: m * x,
    "float": lambda x, m: x * m.to(x.dtype),
    "comparison": lambda x, m: x * (m == 2),
    "in place": lambda x, m: x.clone().mul_(m),
    "addcmul": lambda x, m: torch.addcmul(x, x, m.to(x.dtype)),
    "identity": lambda x, m: x[:5, None] * torch.eye(5, dtype=x.dtype, device=x.device),
    "one hot": lambda x, m: F.one_hot(torch.arange(6, device=x.device)).to(x.dtype) * x,
    "broadcast": lambda x, m: x[:, None] * m[None].to(x.dtype),
}


@pytest.mark.parametrize("form", MASKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_products_with_masks_keep_nan_and_signs(form: str, dtype: torch.dtype) -> None:
    """XLA takes a product with a boolean for a choice between the other factor and 0."""
    x = torch.tensor([math.inf, math.nan, -math.inf, -1.0, 2.0, -0.0], dtype=dtype)
    mask = torch.tensor([False, False, True, False, False, False])
    expected, found = (MASKED[form](x.to(d), mask.to(d)).cpu() for d in ("cpu", "tpu"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    if not dtype.is_complex:
        known = ~expected.isnan()
        assert torch.equal(found.signbit()[known], expected.signbit()[known])


def test_integers_of_every_width() -> None:
    for dtype in (torch.uint8, torch.int8, torch.int16):
        x = torch.tensor([0, 1, 100, 127], dtype=dtype)
        compare(lambda x: (abs(x), -x, x.sign(), x.sqrt(), x.exp(), x.floor(), x.round()), x)
    x = torch.tensor([-(2**63), -1, 2**62 + 1])
    compare(lambda x: (x.sign(), x.maximum(x + 1), x.neg()), x)


def test_nan_to_num_arguments() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.tensor(SPECIAL[:8]).to(dtype)
        compare(lambda x: (x.nan_to_num(), x.nan_to_num(1.0, 2.0, -3.0)), x)


def test_scalar_overloads() -> None:
    x = torch.tensor(SPECIAL)
    compare(torch.ops.aten.xlogy.Scalar_Self, 2.0, x)
    compare(torch.ops.aten.xlogy.Scalar_Other, x, 2.0)
    compare(torch.ops.aten.copysign.Scalar, x, -0.0)
    compare(lambda: x.round(decimals=2))
    compare(lambda: (x * 17).round(decimals=-1))


# Functions whose value jumps at a cut, and the logarithms, which are infinite at 0.
WITH_CUTS = {
    **{n: getattr(torch, n) for n in ("sqrt", "rsqrt", "asin", "acos", "asinh", "acosh")},
    **{n: getattr(torch, n) for n in ("atan", "atanh", "log", "log2", "log10", "log1p")},
    "** 0.5": lambda x: x**0.5,
    "** -0.5": lambda x: x**-0.5,
}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", WITH_CUTS)
def test_complex_functions_at_their_branch_cuts(name: str, dtype: torch.dtype) -> None:
    """The sign of a zero says on which side of the cut a number is."""
    parts = torch.tensor([-2.0, -0.75, -0.0, 0.0, 0.5, 2.0], dtype=dtype.to_real())
    real, imaginary = torch.meshgrid(parts, parts, indexing="ij")
    x = torch.complex(real.contiguous(), imaginary.contiguous())
    if name in ("rsqrt", "** -0.5"):
        x = x[x != 0]
    got, expected = (torch.view_as_real(WITH_CUTS[name](t).cpu()) for t in (x.to("tpu"), x))
    torch.testing.assert_close(got, expected, equal_nan=True)


def test_complex_and_polar() -> None:
    a, b = torch.randn(3, 1), torch.randn(4)
    compare(lambda: (torch.complex(a, b), torch.polar(a.abs(), b)))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_empty_and_zero_dim(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    compare(lambda: (x.exp(), x.abs(), x.sqrt(), torch.atan2(x, x), torch.hypot(x, x), x.round()))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8])
def test_gcd_and_lcm_of_extremes(dtype: torch.dtype) -> None:
    """The least integer has no absolute value; the CPU's `lcm` of 32 bits divides by -1 for it."""
    info = torch.iinfo(dtype)
    values = torch.tensor([info.min, info.min + 1, info.max, 0, 1, 3, 6, 100], dtype=dtype)
    values = torch.cat([values, -values])
    a, b = values.view(-1, 1), values
    compare(lambda: torch.gcd(a, b))
    if info.bits < 32:
        compare(lambda: torch.lcm(a, b))


@pytest.mark.parametrize("op", [torch.complex, torch.polar])
def test_complex_of_bfloat16(op: Any) -> None:
    x = torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError) as expected:
        op(x, x)
    with pytest.raises(RuntimeError) as raised:
        op(x.to("tpu"), x.to("tpu"))
    assert str(raised.value) == str(expected.value)


def test_an_imaginary_number_is_true() -> None:
    x = torch.zeros(3, dtype=torch.bool, device="tpu")
    assert x.fill_(1j).all()
