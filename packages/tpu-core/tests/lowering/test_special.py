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
special.airy_ai special.entr special.erfcx special.log_ndtr special.ndtri special.zeta
special.xlog1py""".split()
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


def test_lgamma_has_its_digits_around_its_zeros() -> None:
    x = torch.linspace(0.5, 2.5, 1001)
    near = torch.tensor([1.0, 2.0, 1 - 1e-6, 1 + 1e-6, 2 - 1e-6, 2 + 1e-6])
    for values in (x, near):
        got = torch.lgamma(values.to("tpu")).cpu()
        torch.testing.assert_close(got, torch.lgamma(values), rtol=2e-6, atol=1e-9)
    assert torch.lgamma(near.to("tpu")[:2]).cpu().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_polygamma_at_its_pole(n: int) -> None:
    x = torch.tensor([0.0, 1.0, -1.0])
    got = torch.polygamma(n, x.to("tpu")).cpu()
    torch.testing.assert_close(got, torch.polygamma(n, x), rtol=1e-5, atol=1e-5, equal_nan=True)


def functions(names: str):
    return [getattr(torch.special, n) for n in names.split()]


@pytest.mark.parametrize(
    "fn",
    functions(
        "airy_ai erf erfc erfinv gammaln digamma i0 i0e i1 i1e entr erfcx log_ndtr ndtri bessel_j0 "
        "bessel_j1 bessel_y0 bessel_y1 modified_bessel_k0 modified_bessel_k1 "
        "scaled_modified_bessel_k0 scaled_modified_bessel_k1"
    ),
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


@pytest.mark.parametrize(
    "fn",
    functions(
        "bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_k0 modified_bessel_k1 "
        "scaled_modified_bessel_k0 scaled_modified_bessel_k1"
    ),
    ids=lambda fn: fn.__name__,
)
def test_bessel_functions_in_each_range(fn) -> None:
    near_borders = torch.tensor([1e-6, 1e-3, 1.999, 2.0, 2.001, 4.999, 5.0, 5.001, 30.0, 1e4])
    compare(fn, torch.cat([near_borders, -near_borders]).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_airy_function_in_each_range(dtype: torch.dtype) -> None:
    borders = torch.tensor([2.089, 2.09, 2.091, 8.32, 8.321, 30.0, 103.89, 103.9], dtype=dtype)
    inside = torch.linspace(-20, 20, 401, dtype=dtype)
    compare(torch.special.airy_ai, torch.cat([borders, -borders[:6], inside]))


@pytest.mark.parametrize(
    "fn",
    functions(
        "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v "
        "chebyshev_polynomial_w shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u "
        "shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w hermite_polynomial_h "
        "hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p"
    ),
    ids=lambda fn: fn.__name__,
)
def test_polynomials_of_each_degree(fn) -> None:
    x = torch.tensor([*VALUES, 0.3, 0.9999, -0.9999, -1.5, 7.0], dtype=torch.float64)
    degrees = [*range(-1, 12), 30, 130, 513, 2.7, math.nan, math.inf]
    compare(fn, x[:, None], torch.tensor(degrees, dtype=torch.float64))
