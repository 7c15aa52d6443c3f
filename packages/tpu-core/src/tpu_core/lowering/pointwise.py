"""Elementary functions of one or two operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, compute, compute_float, promote
from tpu_core.lowering import branch_cuts
from tpu_core.lowering.arithmetic import on_common_shape, trunc
from tpu_core.lowering.registry import lowering, register_table

Array = jax.Array


def floats(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A unary lowering that computes in floating point, whatever the operand."""
    return lambda self: fn(*compute_float(self))


def keep_integers(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A unary lowering that is the identity on integers."""
    return lambda self: fn(*compute(self)) if self.dtype.kind not in "biu" else self


def binary(fn: Callable[[Array, Array], Array]) -> Callable[[Any, Any], Array]:
    """A binary lowering over operands promoted to a common dtype."""
    return lambda self, other: fn(*compute(self, other))


def binary_floats(fn: Callable[[Array, Array], Array]) -> Callable[[Any, Any], Array]:
    """A binary lowering that computes in floating point, whatever the operands."""
    return lambda self, other: fn(*compute_float(self, other))


# --- Two operands


@lowering("aten.maximum.default")
def maximum(self: Array, other: Array) -> Array:
    return jnp.maximum(*promote(self, other))


@lowering("aten.minimum.default")
def minimum(self: Array, other: Array) -> Array:
    return jnp.minimum(*promote(self, other))


def _hypot(x: Array, y: Array) -> Array:
    x, y = jnp.abs(x), jnp.abs(y)
    high, low = jnp.maximum(x, y), jnp.minimum(x, y)
    ratio = low / jnp.where(high == 0, jnp.ones_like(high), high)
    root = high * jnp.sqrt(1 + ratio * ratio)
    return jnp.where(jnp.isinf(x) | jnp.isinf(y), jnp.full_like(root, jnp.inf), root)


def _real_of_infinite_exp(x: Array) -> Array:
    """Real part of ``exp(x)`` where that of ``x`` is infinite, as C's library defines it."""
    real = jnp.real(jnp.exp(x))
    return jnp.where(jnp.isinf(jnp.imag(x)), jnp.full_like(real, jnp.inf), real)


def _log_add_exp_complex(x: Array, y: Array) -> Array:
    """As aten/src/ATen/native/cpu/LogAddExp.h, which does not wrap the imaginary part."""
    later = jnp.real(x) < jnp.real(y)
    low, high = jnp.where(later, x, y), jnp.where(later, y, x)
    sum_ = high + jnp.log1p(jnp.exp(low - high))
    # XLA's exp of a real part of -inf is NaN where the imaginary part is infinite.
    sum_ = jnp.where(jnp.real(low) == -jnp.inf, high, sum_)
    sum_ = jnp.where(jnp.real(high) == jnp.inf, high, sum_)
    # Equal infinities: inf - inf has no value.
    equal = jnp.isinf(jnp.real(low)) & (jnp.real(low) == jnp.real(high))
    total_real = _real_of_infinite_exp(low) + _real_of_infinite_exp(high)
    total = jnp.exp(low) + jnp.exp(high)
    # XLA's log of an infinity beside NaN is NaN in both parts.
    infinite = jnp.isinf(total_real) | jnp.isinf(jnp.imag(total))
    modulus = jnp.where(infinite, jnp.full_like(total_real, jnp.inf), total_real * np.nan)
    high_infinity = lax.complex(modulus, jnp.imag(jnp.log(total)))
    at_infinity = jnp.where(jnp.real(low) < 0, low, high_infinity)
    sum_ = jnp.where(equal, at_infinity, sum_)
    nan = jnp.full_like(sum_, complex(np.nan, np.nan))
    return jnp.where(jnp.isnan(x) | jnp.isnan(y), nan, sum_)


def log_add_exp(x: Array, y: Array) -> Array:
    """``log(exp(x) + exp(y))`` of operands of one dtype."""
    if x.dtype.kind == "c":
        return _log_add_exp_complex(x, y)
    # Equal infinities would give inf - inf.
    delta = jnp.where(x == y, jnp.zeros((), x.dtype), -jnp.abs(x - y))
    return jnp.maximum(x, y) + jnp.log1p(jnp.exp(delta))


def _logaddexp2(x: Array, y: Array) -> Array:
    if x.dtype.kind == "c":
        log2 = math.log(2)
        return log_add_exp(x * log2, y * log2) / log2
    delta = jnp.where(x == y, jnp.zeros((), x.dtype), -jnp.abs(x - y))
    return jnp.maximum(x, y) + jnp.log1p(_exp2(delta)) * (1 / math.log(2))


def xlogy(x: Array, y: Array) -> Array:
    """``x * log(y)``, 0 where x is 0 and y is a number."""
    product = jnp.where(x == 0, jnp.zeros((), x.dtype), x * jnp.log(y))
    return jnp.where(jnp.isnan(y), jnp.full((), jnp.nan, x.dtype), product)


def _copysign(x: Array, y: Array) -> Array:
    return jnp.where(jnp.signbit(y), -jnp.abs(x), jnp.abs(x))


def _heaviside(x: Array, values: Array) -> Array:
    return jnp.where(x == 0, values, (x > 0).astype(values.dtype))


@lowering("aten.nextafter.default")
def nextafter(self: Array, other: Array) -> Array:
    return on_common_shape(lax.nextafter, *promote(self, other))


def _exp2(x: Array) -> Array:
    # XLA's exp2 is exp(x * log(2)) and misses the powers of two, as its power does on GPUs.
    two = jnp.full((), 2, x.dtype)
    if x.dtype.kind == "c":
        return jnp.power(two, x)
    most = -2 * jnp.finfo(x.dtype).minexp  # all is 0 or infinite beyond
    whole = jnp.clip(jnp.round(x), -most, most)
    half = jnp.floor(whole / 2)  # in two steps, as a power of a whole exponent may be subnormal
    return jnp.power(two, x - whole) * _power_of_two(half) * _power_of_two(whole - half)


def _power_of_two(exponent: Array) -> Array:
    """2 to the power of whole numbers, which normal numbers of their dtype are: its bits."""
    kind = jnp.finfo(exponent.dtype)
    bits = np.dtype(f"i{exponent.dtype.itemsize}")
    biased = exponent.astype(bits) + bits.type(kind.maxexp - 1)
    return lax.bitcast_convert_type(biased << bits.type(kind.nmant), exponent.dtype)


@lowering("aten.ldexp.Tensor")
def ldexp(self: Array, other: Array) -> Array:
    a, b = compute_float(self, other)
    return a * _exp2(b)


@lowering("aten.complex.default")
def complex_(real: Array, imag: Array) -> Array:
    real, imag = compute(real, imag)
    return on_common_shape(lax.complex, real, imag)


@lowering("aten.polar.default")
def polar(abs: Array, angle: Array) -> Array:
    abs, angle = compute(abs, angle)
    return on_common_shape(lax.complex, abs * jnp.cos(angle), abs * jnp.sin(angle))


@lowering("aten.gcd.default")
def gcd(self: Array, other: Array) -> Array:
    return on_common_shape(_gcd, *compute(self, other))


def _gcd(a: Array, b: Array) -> Array:
    """As ATen's loop, remainders with the dividend's sign: the least integer has no absolute value,
    so that the result may be negative (aten/src/ATen/native/Math.h).
    """

    def step(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        a, b = pair
        goes_on = a != 0
        divisor = jnp.where(goes_on, a, jnp.ones((), a.dtype))
        rest = jnp.where(goes_on, lax.rem(b, divisor), a)
        return rest, jnp.where(goes_on, a, b)

    return lax.while_loop(lambda pair: jnp.any(pair[0] != 0), step, (jnp.abs(a), jnp.abs(b)))[1]


@lowering("aten.lcm.default")
def lcm(self: Array, other: Array) -> Array:
    a, b = compute(self, other)
    dtype = a.dtype
    if dtype.itemsize < 4:  # C computes in 32 bits
        a, b = a.astype(np.int32), b.astype(np.int32)
    return on_common_shape(_lcm, a, b).astype(dtype)


def _lcm(a: Array, b: Array) -> Array:
    divisor = _gcd(a, b)
    whole = lax.div(a, jnp.where(divisor == 0, jnp.ones((), a.dtype), divisor))
    return jnp.abs(whole * b)


register_table(
    {
        "aten.fmax.default": binary(jnp.fmax),
        "aten.fmin.default": binary(jnp.fmin),
        "aten.hypot.default": binary(_hypot),
        "aten.heaviside.default": binary(_heaviside),
        "aten.logaddexp.default": binary_floats(log_add_exp),
        "aten.logaddexp2.default": binary_floats(_logaddexp2),
        "aten.atan2.default": binary_floats(jnp.arctan2),
        "aten.copysign.Tensor": binary_floats(_copysign),
        "aten.copysign.Scalar": binary_floats(_copysign),
        "aten.xlogy.Tensor": binary_floats(xlogy),
        "aten.xlogy.Scalar_Self": binary_floats(xlogy),
        "aten.xlogy.Scalar_Other": binary_floats(xlogy),
    }
)


# --- One operand


def _log_of_base(base: float) -> Callable[[Array], Array]:
    def log(x: Array) -> Array:
        value, scale = jnp.log(x), 1 / math.log(base)
        if x.dtype.kind == "c":  # a complex product of an infinite part has no other part
            return lax.complex(value.real * scale, value.imag * scale)
        value *= scale
        # Powers of the base give whole numbers, for floor(log2(n)): two ulp are rounded away.
        whole = jnp.round(value)
        slack = 2 * float(jnp.finfo(x.dtype).eps)
        return jnp.where(jnp.abs(value - whole) <= slack * jnp.abs(whole), whole, value)

    return log


def _sinc(x: Array) -> Array:
    angle = x * math.pi
    safe = jnp.where(x == 0, jnp.ones_like(angle), angle)
    return jnp.where(x == 0, jnp.ones_like(angle), jnp.sin(safe) / safe)


def _scaled(factor: float) -> Callable[[Array], Array]:
    return lambda x: x * jnp.asarray(factor, x.dtype)


@lowering("aten.abs.default")
def abs_(self: Array) -> Array:
    return self if self.dtype.kind in "bu" else jnp.abs(self)


@lowering("aten.angle.default")
def angle(self: Array) -> Array:
    if self.dtype.kind == "c":
        return lax.atan2(jnp.imag(self), jnp.real(self))
    (x,) = compute_float(self)
    turned = jnp.where(x < 0, jnp.full((), math.pi, x.dtype), jnp.zeros((), x.dtype))
    return jnp.where(jnp.isnan(x), x, turned)


@lowering("aten.sign.default")
def sign(self: Array) -> Array:
    # 0 at NaN, unlike jnp.sign.
    if self.dtype.kind in "bu":
        return self if self.dtype == np.bool_ else (self > 0).astype(self.dtype)
    return (self > 0).astype(self.dtype) - (self < 0).astype(self.dtype)


@lowering("aten.sgn.default")
def sgn(self: Array) -> Array:
    if self.dtype.kind != "c":
        return sign(self)
    size = jnp.abs(self)
    safe = jnp.where(size == 0, jnp.ones_like(size), size)
    return jnp.where(size == 0, jnp.zeros_like(self), self / safe)


@lowering("aten.round.decimals")
def round_decimals(self: Array, *, decimals: int) -> Array:
    if self.dtype.kind in "biu":
        return self
    (x,) = compute(self)
    scale = jnp.asarray(10.0 ** abs(decimals), x.dtype)
    return jnp.round(x * scale) / scale if decimals >= 0 else jnp.round(x / scale) * scale


@lowering("aten.nan_to_num.default")
def nan_to_num(self: Array, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Array:
    if self.dtype.kind in "biu":
        return self
    if self.dtype.kind == "c":
        parts = (nan_to_num(p, nan, posinf, neginf) for p in (jnp.real(self), jnp.imag(self)))
        return lax.complex(*parts)
    info, dtype = jnp.finfo(self.dtype), self.dtype
    nan = cast(0.0 if nan is None else nan, dtype)
    high = cast(posinf, dtype) if posinf is not None else jnp.asarray(info.max, dtype)
    low = cast(neginf, dtype) if neginf is not None else jnp.asarray(info.min, dtype)
    value = jnp.where(jnp.isnan(self), nan, self)
    return jnp.where(jnp.isposinf(self), high, jnp.where(jnp.isneginf(self), low, value))


@lowering("aten.frexp.Tensor")
def frexp(self: Array) -> tuple[Array, Array]:
    return jnp.frexp(*compute(self))


@lowering("aten.logit.default")
def logit(self: Array, eps: Any = None) -> Array:
    (x,) = compute_float(self)
    if eps is not None:
        low = cast(eps, x.dtype)
        high = 1 - low
        # With eps over 0.5 the lower bound counts, as in ATen.
        x = jnp.where(x < low, low, jnp.where(x > high, high, x))
    return jnp.log(x / (1 - x))


register_table(
    {
        "aten.neg.default": lambda self: -self,
        "aten._conj_physical.default": jnp.conj,
        # Of `conj_physical_` and `out=`; the op itself is PyTorch's composite.
        "aten.conj_physical.default": jnp.conj,
        "aten.reciprocal.default": floats(lambda x: 1 / x),
        "aten.sqrt.default": floats(branch_cuts.sqrt),
        "aten.rsqrt.default": floats(branch_cuts.rsqrt),
        "aten.exp.default": floats(jnp.exp),
        "aten.exp2.default": floats(_exp2),
        "aten.expm1.default": floats(jnp.expm1),
        "aten.log.default": floats(jnp.log),
        "aten.log2.default": floats(_log_of_base(2)),
        "aten.log10.default": floats(_log_of_base(10)),
        "aten.log1p.default": floats(jnp.log1p),
        "aten.sin.default": floats(jnp.sin),
        "aten.cos.default": floats(jnp.cos),
        "aten.tan.default": floats(jnp.tan),
        "aten.asin.default": floats(branch_cuts.asin),
        "aten.acos.default": floats(branch_cuts.acos),
        "aten.atan.default": floats(jnp.arctan),
        "aten.sinh.default": floats(jnp.sinh),
        "aten.cosh.default": floats(jnp.cosh),
        "aten.tanh.default": floats(jnp.tanh),
        "aten.asinh.default": floats(branch_cuts.asinh),
        "aten.acosh.default": floats(branch_cuts.acosh),
        "aten.atanh.default": floats(jnp.arctanh),
        "aten.sigmoid.default": floats(lax.logistic),
        "aten.sinc.default": floats(_sinc),
        "aten.deg2rad.default": floats(_scaled(math.pi / 180)),
        "aten.rad2deg.default": floats(_scaled(180 / math.pi)),
        "aten.floor.default": keep_integers(jnp.floor),
        "aten.ceil.default": keep_integers(jnp.ceil),
        "aten.trunc.default": keep_integers(trunc),
        "aten.round.default": keep_integers(jnp.round),
        "aten.frac.default": keep_integers(lambda x: x - trunc(x)),
    }
)
