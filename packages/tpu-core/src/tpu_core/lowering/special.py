"""Special functions: error and gamma families, zeta, modified Bessel functions of first kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from tpu_core.dtypes import compute_float
from tpu_core.lowering.pointwise import binary_floats, floats
from tpu_core.lowering.registry import lowering, register_table

Array = jax.Array


def _digamma(x: Array) -> Array:
    # XLA gives NaN at 0, PyTorch an infinity (aten/src/ATen/native/Math.h, calc_digamma).
    pole = jnp.where(jnp.signbit(x), jnp.full_like(x, jnp.inf), jnp.full_like(x, -jnp.inf))
    return jnp.where(x == 0, pole, lax.digamma(x))


def _zeta(x: Array, q: Array) -> Array:
    """Hurwitz zeta with PyTorch's poles (aten/src/ATen/native/Math.h, zeta)."""
    x, q = jnp.broadcast_arrays(x, q)
    infinity, nan = jnp.full_like(x, jnp.inf), jnp.full_like(x, jnp.nan)
    last = jnp.where(q == 1, jnp.ones_like(x), jnp.where(q < 1, infinity, nan))
    value = jnp.where(jnp.isposinf(x), last, lax.zeta(x, q))
    value = jnp.where((q <= 0) & (x != jnp.floor(x)), nan, value)
    value = jnp.where((q <= 0) & (q == jnp.floor(q)), infinity, value)
    return jnp.where(x == 1, infinity, jnp.where(x < 1, nan, value))


def _incomplete_gamma(fn: Callable[[Array, Array], Array], lower: bool) -> Any:
    """``fn`` with PyTorch's values at the borders (aten/src/ATen/native/Math.h, calc_igamma)."""

    def gamma(a: Array, x: Array) -> Array:
        a, x = jnp.broadcast_arrays(a, x)
        nan = jnp.full_like(a, jnp.nan)
        none, all_ = jnp.full_like(a, 0 if lower else 1), jnp.full_like(a, 1 if lower else 0)
        value = jnp.where(jnp.isinf(x), all_, fn(a, x))
        value = jnp.where(jnp.isinf(a), jnp.where(jnp.isinf(x), nan, none), value)
        value = jnp.where(x == 0, none, value)
        value = jnp.where(a == 0, jnp.where(x > 0, all_, nan), value)
        return jnp.where((x < 0) | (a < 0), nan, value)

    return gamma


def _trigamma(x: Array) -> Array:
    """Reflection below 0.5, then zeta (aten/src/ATen/native/Math.h, trigamma)."""
    sine = jnp.sin(math.pi * x)
    above = lax.zeta(jnp.full_like(x, 2), jnp.where(x < 0.5, 1 - x, x))
    return jnp.where(x < 0.5, (math.pi * math.pi) / (sine * sine) - above, above)


@lowering("aten.polygamma.default")
def polygamma(n: int, self: Array) -> Array:
    (x,) = compute_float(self)
    if n == 0:
        return _digamma(x)
    if n == 1:
        return _trigamma(x)
    sign = 1.0 if n % 2 else -1.0
    scale = jnp.asarray(sign * math.exp(math.lgamma(n + 1)), x.dtype)
    negative = x < 0
    value = scale * lax.zeta(jnp.full_like(x, n + 1), jnp.where(negative, 1 - x, x))
    # XLA's zeta sums too few terms for negative arguments: reflect them. The n-th derivative of the
    # cotangent is a polynomial in it, by d/dx cot = -(1 + cot^2).
    polynomial = np.polynomial.Polynomial([0.0, 1.0])
    for _ in range(n):
        polynomial = polynomial.deriv() * np.polynomial.Polynomial([-1.0, 0.0, -1.0])
    cotangent = 1 / jnp.tan(math.pi * (x - jnp.round(x)))
    coefficients = jnp.asarray((polynomial.coef[::-1] * math.pi ** (n + 1)).astype(x.dtype))
    reflected = -sign * value - jnp.polyval(coefficients, cotangent)
    reflected = jnp.where(x == jnp.floor(x), jnp.full_like(x, sign * math.inf), reflected)
    value = jnp.where(x == 0, jnp.full_like(x, sign * math.inf), value)
    return jnp.where(negative, reflected, value)


def _xlog1py(x: Array, y: Array) -> Array:
    product = jnp.where(x == 0, jnp.zeros((), x.dtype), x * jnp.log1p(y))
    return jnp.where(jnp.isnan(y), jnp.full((), jnp.nan, x.dtype), product)


def _log_ndtr(x: Array) -> Array:
    # aten/src/ATen/native/Math.h, calc_log_ndtr; both branches are kept finite where unused.
    t = x * math.sqrt(0.5)
    low = jnp.minimum(t, -math.sqrt(0.5))
    tail = jnp.log(special.erfcx(-low) / 2) - low * low
    return jnp.where(x < -1, tail, jnp.log1p(-lax.erfc(t) / 2))


# Cephes, lgamf: coefficients of log(gamma(x + 1)) / x and log(gamma(x + 2)) / x around 0.
_LGAMMA_1 = (
    *(1.369488127325832e-1, -1.590086327657347e-1, 1.692415923504637e-1, -2.067882815621965e-1),
    *(2.705806208275915e-1, -4.006931650563372e-1, 8.224670749082976e-1, -5.772156501719101e-1),
)
_LGAMMA_2 = (
    *(6.055172732649237e-4, -1.311620815545743e-3, 2.863437556468661e-3, -7.366775108654962e-3),
    *(2.058355474821512e-2, -6.735323259371034e-2, 3.224669577325661e-1, 4.227843421859038e-1),
)


def _lgamma(x: Array) -> Array:
    """XLA's sum of logarithms leaves no digits near 1 and 2 in float32, where the result is 0."""
    value = lax.lgamma(x)
    if x.dtype != np.float32:
        return value
    by_1, by_2 = x - 1, x - 2
    near_1 = by_1 * jnp.polyval(jnp.asarray(_LGAMMA_1, x.dtype), by_1)
    near_2 = by_2 * jnp.polyval(jnp.asarray(_LGAMMA_2, x.dtype), by_2)
    shifted = by_1 * jnp.polyval(jnp.asarray(_LGAMMA_2, x.dtype), by_1)  # of x + 1
    around_1 = shifted - jnp.log(jnp.where(x > 0, x, jnp.ones_like(x)))
    near_1 = jnp.where(by_1 == 0, by_1, near_1)  # 0, not -0
    value = jnp.where((x >= 0.5) & (x < 1.5), around_1, value)
    value = jnp.where((x >= 0.75) & (x < 1.25), near_1, value)
    return jnp.where((x >= 1.5) & (x <= 2.5), near_2, value)


def _entr(x: Array) -> Array:
    safe = jnp.where(x > 0, x, jnp.ones_like(x))
    value = jnp.where(x > 0, -safe * jnp.log(safe), jnp.zeros_like(x))
    value = jnp.where(x < 0, jnp.full_like(x, -jnp.inf), value)
    return jnp.where(jnp.isnan(x), x, value)


def _spherical_bessel_j0(x: Array) -> Array:
    # aten/src/ATen/native/Math.h, spherical_bessel_j0_forward: a series near 0, 0 at infinity.
    square = x * x
    series = 1 - square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72)))
    safe = jnp.where(x == 0, jnp.ones_like(x), x)
    value = jnp.where(jnp.abs(x) < 0.5, series, jnp.sin(safe) / safe)
    return jnp.where(jnp.isinf(x), jnp.zeros_like(x), value)


register_table(
    {
        "aten.erf.default": floats(lax.erf),
        "aten.erfc.default": floats(lax.erfc),
        "aten.erfinv.default": floats(lax.erf_inv),
        "aten.lgamma.default": floats(_lgamma),
        "aten.digamma.default": floats(_digamma),
        "aten.i0.default": floats(special.i0),
        "aten.special_i0e.default": floats(lax.bessel_i0e),
        "aten.special_i1.default": floats(special.i1),
        "aten.special_i1e.default": floats(lax.bessel_i1e),
        "aten.special_modified_bessel_i0.default": floats(special.i0),
        "aten.special_modified_bessel_i1.default": floats(special.i1),
        "aten.special_spherical_bessel_j0.default": floats(_spherical_bessel_j0),
        "aten.special_entr.default": floats(_entr),
        "aten.special_erfcx.default": floats(special.erfcx),
        "aten.special_log_ndtr.default": floats(_log_ndtr),
        "aten.special_ndtri.default": floats(special.ndtri),
        "aten.igamma.default": binary_floats(_incomplete_gamma(lax.igamma, lower=True)),
        "aten.igammac.default": binary_floats(_incomplete_gamma(lax.igammac, lower=False)),
        "aten.special_zeta.default": binary_floats(_zeta),
        "aten.special_zeta.self_scalar": binary_floats(_zeta),
        "aten.special_zeta.other_scalar": binary_floats(_zeta),
        "aten.special_xlog1py.default": binary_floats(_xlog1py),
        "aten.special_xlog1py.self_scalar": binary_floats(_xlog1py),
        "aten.special_xlog1py.other_scalar": binary_floats(_xlog1py),
    }
)
