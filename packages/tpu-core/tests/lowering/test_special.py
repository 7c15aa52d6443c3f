"""Special functions against the CPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tpu_core import lowering

from .harness import CompareLowerings, check_opinfo

lowering.load()

OPS = """erf erfc erfinv lgamma digamma polygamma i0 igamma igammac special.i0e special.i1
special.i1e special.modified_bessel_i0 special.modified_bessel_i1 special.spherical_bessel_j0
special.entr special.erfcx special.log_ndtr special.ndtri special.zeta special.xlog1py""".split()
# High orders sum large terms of both signs: a few float32 ulp more than the default.
POLYGAMMA = {torch.float32: (1e-5, 1e-4)}


@pytest.mark.parametrize("name", OPS)
def test_opinfo(name: str) -> None:
    dtypes = [torch.float32, torch.float64]
    if name != "polygamma":  # which the CPU computes in bfloat16 itself
        dtypes += [torch.bfloat16, torch.int64]
    tolerance = POLYGAMMA if name == "polygamma" else {}
    mode = check_opinfo(name, dtypes=dtypes, samples=2, tolerance=tolerance, check_width=True)
    assert not mode.failures
    assert f"aten.{name.replace('.', '_')}.default" in mode.seen


VALUES = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.0]


def compare(fn, *args, **options) -> None:
    mode = CompareLowerings(check_width=True, **options)
    with mode:
        fn(*args)
    assert not mode.failures
    assert mode.seen


def functions(names: str):
    return [getattr(torch.special, n) for n in names.split()]


@pytest.mark.parametrize(
    "fn",
    functions("erf erfc erfinv gammaln digamma i0 i0e i1 i1e entr erfcx log_ndtr ndtri"),
    ids=lambda fn: fn.__name__,
)
def test_special_values(fn) -> None:
    compare(fn, torch.tensor(VALUES))


@pytest.mark.parametrize(
    "fn", functions("gammainc gammaincc zeta xlog1py"), ids=lambda fn: fn.__name__
)
def test_pairs_of_special_values(fn) -> None:
    pairs = torch.tensor(list(itertools.product(VALUES, VALUES)))
    compare(fn, pairs[:, 0].clone(), pairs[:, 1].clone())


@pytest.mark.parametrize("order", [0, 1, 2, 3, 6])
def test_polygamma_left_of_zero(order: int) -> None:
    x = torch.tensor([-5.3, -2.5, -0.5, -0.1, 0.3, 1.0, 7.5], dtype=torch.float64)
    compare(torch.polygamma, order, x)


def test_scalar_overloads() -> None:
    x = torch.tensor([0.5, 2.0, 3.0])
    compare(lambda: (torch.special.zeta(2.0, x), torch.special.zeta(x, 2.0)))
    compare(lambda: (torch.special.xlog1py(2.0, x), torch.special.xlog1py(x, 2.0)))
