"""Orthogonal polynomials of integer degree, by their recurrences, as ATen computes them.

Values at the ends of the interval and, for high degrees inside it, the trigonometric forms are
those of aten/src/ATen/native/Math.h.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.lowering.pointwise import binary_floats
from tpu_core.lowering.registry import register_table

Array = jax.Array
Step = Callable[[Array, Array, Array, Array], Array]
# The degrees from which ATen gives NaN (getHermitianLimit).
_HERMITE_LIMIT = {np.dtype(np.float32): 128, np.dtype(np.float64): 512}


def _recurrence(x: Array, n: Array, first: Array, step: Step) -> Array:
    """The polynomial of degree ``n``, from 1 and ``first`` on; 0 where ``n`` is negative.

    Args:
        x: Points of the evaluation.
        n: Degrees, whole numbers.
        first: The polynomial of degree 1.
        step: The polynomial of degree ``k + 1`` from x, those of degrees ``k`` and ``k - 1``, and
            ``k``.
    """

    def goes_on(state: tuple[Array, Array, Array]) -> Array:
        k, q, _ = state
        return jnp.any((k.astype(n.dtype) < n) & ~jnp.isnan(q))

    def advance(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        k, q, p = state
        degree = k.astype(n.dtype)
        more = degree < n
        return k + 1, jnp.where(more, step(x, q, p, degree), q), jnp.where(more, q, p)

    one = jnp.ones_like(x)
    start = (jnp.asarray(1, np.int32), first, one)
    _, value, _ = lax.while_loop(goes_on, advance, start)
    value = jnp.where(n == 0, one, value)
    return jnp.where(n < 0, jnp.zeros_like(x), value)


def _degrees(x: Array, n: Array) -> tuple[Array, Array]:
    x, n = jnp.broadcast_arrays(x, n)
    # A number that no int64 holds becomes its least value in C.
    return x, jnp.where(jnp.isfinite(n), jnp.trunc(n), jnp.full_like(n, -1))


def _sign(n: Array) -> Array:
    """1 for even degrees, -1 for odd ones."""
    return jnp.where(n == 2 * jnp.floor(n / 2), jnp.ones_like(n), jnp.full_like(n, -1))


def _chebyshev(
    kind: str, shifted: bool, trigonometric_from: int
) -> Callable[[Array, Array], Array]:
    """The polynomial of a kind (t, u, v, w), at ``2 x - 1`` if shifted."""

    def polynomial(x: Array, n: Array) -> Array:
        given, n = _degrees(x, n)
        x = given + given - 1 if shifted else given
        high = {"t": jnp.ones_like(n), "u": n + 1, "v": jnp.ones_like(n), "w": n + n + 1}[kind]
        low = {"t": _sign(n), "u": _sign(n) * (n + 1), "v": _sign(n) * (n + n + 1), "w": _sign(n)}
        first = {"t": x, "u": x + x, "v": x + x - 1, "w": x + x + 1}[kind]
        inside = (n > trigonometric_from) & (jnp.abs(x) < 1)
        at_high = given == 1
        at_low = given == (0 if shifted else -1)
        # Where another form holds, no step of the recurrence is needed.
        degree = jnp.where(inside | at_high | at_low, jnp.minimum(n, 1), n)
        value = _recurrence(x, degree, first, lambda x, q, p, k: (x + x) * q - p)
        angle = jnp.arccos(jnp.where(inside, x, jnp.zeros_like(x)))
        value = jnp.where(inside, _trigonometric(kind, angle, n, x), value)
        value = jnp.where(at_high, high, value)
        value = jnp.where(at_low, low[kind], value)
        return jnp.where(n < 0, jnp.zeros_like(x), value)

    return polynomial


def _trigonometric(kind: str, angle: Array, n: Array, x: Array) -> Array:
    if kind == "t":
        return jnp.cos(n * angle)
    if kind == "u":
        sine = jnp.sin(angle)
        at_end = (n + 1) * jnp.cos((n + 1) * angle) / x
        return jnp.where(sine != 0, jnp.sin((n + 1) * angle) / sine, at_end)
    if kind == "v":
        ratio = jnp.cos((n + 0.5) * angle) / jnp.cos(angle / 2)
        return jnp.where(jnp.sin(angle / 2) != 1, ratio, _sign(n) * (n + n + 1))
    ratio = jnp.sin((n + 0.5) * angle) / jnp.sin(angle / 2)
    return jnp.where(jnp.cos(angle / 2) != 1, ratio, jnp.where(x > 0, n + n + 1, _sign(n)))


def _hermite(factor: int) -> Callable[[Array, Array], Array]:
    """The physicists' polynomial (factor 2) or the probabilists' (1)."""

    def polynomial(x: Array, n: Array) -> Array:
        x, n = _degrees(x, n)
        too_high = n > _HERMITE_LIMIT[np.dtype(x.dtype)]
        degree = jnp.where(too_high, jnp.ones_like(n), n)
        value = _recurrence(
            x, degree, factor * x, lambda x, q, p, k: factor * x * q - factor * k * p
        )
        return jnp.where(too_high, jnp.full_like(x, jnp.nan), value)

    return polynomial


def _laguerre(x: Array, n: Array) -> Array:
    x, n = _degrees(x, n)
    degree = jnp.where(x == 0, jnp.minimum(n, 0), n)
    return _recurrence(
        x, degree, 1 - x, lambda x, q, p, k: ((k + k + (1 - x)) * q - k * p) / (k + 1)
    )


def _legendre(x: Array, n: Array) -> Array:
    x, n = _degrees(x, n)
    at_end = jnp.abs(x) == 1
    degree = jnp.where(at_end, jnp.minimum(n, 1), n)
    value = _recurrence(x, degree, x, lambda x, q, p, k: ((k + k + 1) * x * q - k * p) / (k + 1))
    end = jnp.where(x > 0, jnp.ones_like(x), _sign(n))
    return jnp.where(at_end & (n >= 0), end, value)


_POLYNOMIALS = {
    "chebyshev_polynomial_t": _chebyshev("t", shifted=False, trigonometric_from=6),
    "chebyshev_polynomial_u": _chebyshev("u", shifted=False, trigonometric_from=8),
    "chebyshev_polynomial_v": _chebyshev("v", shifted=False, trigonometric_from=8),
    "chebyshev_polynomial_w": _chebyshev("w", shifted=False, trigonometric_from=8),
    "shifted_chebyshev_polynomial_t": _chebyshev("t", shifted=True, trigonometric_from=6),
    "shifted_chebyshev_polynomial_u": _chebyshev("u", shifted=True, trigonometric_from=6),
    "shifted_chebyshev_polynomial_v": _chebyshev("v", shifted=True, trigonometric_from=6),
    "shifted_chebyshev_polynomial_w": _chebyshev("w", shifted=True, trigonometric_from=4),
    "hermite_polynomial_h": _hermite(2),
    "hermite_polynomial_he": _hermite(1),
    "laguerre_polynomial_l": _laguerre,
    "legendre_polynomial_p": _legendre,
}

for _name, _function in _POLYNOMIALS.items():
    register_table(
        {
            f"aten.special_{_name}.{overload}": binary_floats(_function)
            for overload in ("default", "x_scalar", "n_scalar")
        }
    )
