"""Sums, products, quotients, remainders and powers.

Integer division by zero cannot raise inside XLA: where the CPU raises, the result is undefined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, compute, compute_float, is_float, is_number, promote
from tpu_core.lowering.branch_cuts import rsqrt, sqrt
from tpu_core.lowering.registry import lowering

Array = jax.Array


def trunc(x: Array) -> Array:
    return jnp.where(x < 0, jnp.ceil(x), jnp.floor(x))


def is_one(x: Any) -> bool:
    """Return whether a number is the constant 1, as a default argument is."""
    return isinstance(x, (int, float)) and x == 1


# --- add, sub, mul


def _sum_operands(self: Any, other: Any, alpha: Any) -> tuple[Array, Array]:
    # A single addition of short floats rounds the same with or without float32 in between; only
    # numbers and alpha carry more bits, which CUDA keeps, and the CPU does not.
    if is_one(alpha) and not is_number(self) and not is_number(other):
        return promote(self, other)
    a, b = compute(self, other)
    if is_one(alpha):
        return a, b
    return a, b * cast(alpha, b.dtype)


@lowering("aten.add.Tensor", "aten.add.Scalar")
def add(self: Any, other: Any, alpha: Any = 1) -> Array:
    a, b = _sum_operands(self, other, alpha)
    return a + b


@lowering("aten.sub.Tensor", "aten.sub.Scalar")
def sub(self: Any, other: Any, alpha: Any = 1) -> Array:
    a, b = _sum_operands(self, other, alpha)
    return a - b


@lowering("aten.rsub.Tensor", "aten.rsub.Scalar")
def rsub(self: Any, other: Any, alpha: Any = 1) -> Array:
    return sub(other, self, alpha)


@lowering("aten.mul.Tensor", "aten.mul.Scalar")
def mul(self: Any, other: Any) -> Array:
    a, b = _sum_operands(self, other, 1)
    return a * b


# --- Division


@lowering("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor")
def div(self: Any, other: Any) -> Array:
    a, b = compute_float(self, other)
    return a / b


@lowering("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def div_mode(self: Any, other: Any, *, rounding_mode: str | None) -> Array:
    if rounding_mode is None:
        return div(self, other)
    if rounding_mode == "floor":
        return floor_divide(self, other)
    a, b = compute(self, other)
    if is_float(a.dtype):
        return trunc(a / b)
    return on_common_shape(lax.div, *_as_integers(a, b))


@lowering("aten.floor_divide.default", "aten.floor_divide.Scalar")
def floor_divide(self: Any, other: Any) -> Array:
    a, b = compute(self, other)
    if not is_float(a.dtype):
        a, b = _as_integers(a, b)
        quotient, rest = on_common_shape(lax.div, a, b), on_common_shape(lax.rem, a, b)
        return jnp.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)
    # c10/util/floating_point_utils.h, div_floor_floating.
    rest = on_common_shape(lax.rem, a, b)
    quotient = (a - rest) / b
    quotient = jnp.where((rest != 0) & ((b < 0) != (rest < 0)), quotient - 1, quotient)
    floored = jnp.floor(quotient)
    floored = jnp.where(quotient - floored > 0.5, floored + 1, floored)
    floored = jnp.where(quotient != 0, floored, jnp.copysign(jnp.zeros_like(floored), a / b))
    return jnp.where(b == 0, a / b, floored)


@lowering("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
def remainder(self: Any, other: Any) -> Array:
    """Remainder of the divisor's sign, as Python's ``%``."""
    a, b = _rounded_operands(self, other)
    rest = on_common_shape(lax.rem, a, b)
    return jnp.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@lowering("aten.fmod.Tensor", "aten.fmod.Scalar")
def fmod(self: Any, other: Any) -> Array:
    """Remainder of the dividend's sign, as C's ``fmod``."""
    return on_common_shape(lax.rem, *_rounded_operands(self, other))


def _rounded_operands(self: Any, other: Any) -> tuple[Array, Array]:
    """Operands of a remainder: numbers take the tensors' dtype first, unlike elsewhere."""
    return _as_integers(*compute(*promote(self, other)))


def on_common_shape(fn: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    return fn(*jnp.broadcast_arrays(a, b))


def _as_integers(a: Array, b: Array) -> tuple[Array, Array]:
    """Bool operands as uint8: XLA divides no predicates."""
    if a.dtype == np.bool_:
        return a.astype(np.uint8), b.astype(np.uint8)
    return a, b


# --- Powers


@lowering("aten.pow.Tensor_Scalar", static=("exponent",))
def pow_tensor_scalar(self: Array, exponent: Any) -> Array:
    """A constant exponent, so that small ones become products."""
    (base, _) = compute(self, exponent)
    if isinstance(exponent, complex):
        return _complex_power(base, cast(exponent, base.dtype))
    exponent = int(exponent) if isinstance(exponent, bool) else exponent
    if base.dtype.kind in "iu":
        return (
            lax.integer_pow(base, int(exponent))
            if exponent >= 0
            else _integer_power(base, jnp.asarray(int(exponent), base.dtype))
        )
    # aten/src/ATen/native/cpu/PowKernel.cpp, pow_tensor_scalar_optimized_kernel.
    if exponent in (0.5, -0.5):
        return sqrt(base) if exponent > 0 else rsqrt(base)
    if exponent in (-2, -1, 0, 1, 2, 3, 4):
        return lax.integer_pow(base, int(exponent))
    return pow_tensor_tensor(base, cast(exponent, base.dtype))


@lowering("aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def pow_tensor_tensor(self: Any, exponent: Any) -> Array:
    base, exponent = compute(self, exponent)
    if base.dtype == np.bool_:
        return base | ~exponent
    if base.dtype.kind in "iu":
        return _integer_power(base, exponent)
    if base.dtype.kind == "c":
        return _complex_power(base, exponent)
    return on_common_shape(lax.pow, base, exponent)


def _complex_power(base: Array, exponent: Array) -> Array:
    # XLA says NaN at 0 for complex exponents.
    vanishes = (base == 0) & (jnp.real(exponent) > 0)
    return jnp.where(vanishes, jnp.zeros((), base.dtype), jnp.power(base, exponent))


def _integer_power(base: Array, exponent: Array) -> Array:
    """Integer power that wraps, by squaring; a negative exponent gives 0, 1 or -1."""
    base, exponent = jnp.broadcast_arrays(base, exponent)
    one = jnp.ones_like(base)

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        result, factor, bits = state
        return jnp.where(bits & 1 == 1, result * factor, result), factor * factor, bits >> 1

    start = (one, base, jnp.maximum(exponent, 0))
    result = lax.while_loop(lambda state: jnp.any(state[2] > 0), step, start)[0]
    if base.dtype.kind == "u":
        return result
    odd = exponent & 1 == 1
    inverse = jnp.where(base == 1, one, jnp.where(base == -1, jnp.where(odd, -one, one), 0 * one))
    return jnp.where(exponent < 0, inverse, result)
