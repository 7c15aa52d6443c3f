"""Complex roots and inverse functions, on the side of a branch cut that the sign of a zero names.

C99 (annex G) and PyTorch have them conjugate symmetric: a part of the result that changes its sign
across the cut has the sign of a part of the operand, also where that is -0.0, which XLA loses.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def _is_complex(x: Array) -> bool:
    return x.dtype.kind == "c"


def _imaginary_as(y: Array, sign: Array) -> Array:
    return lax.complex(y.real, jnp.copysign(y.imag, sign))


def sqrt(x: Array) -> Array:
    return _imaginary_as(jnp.sqrt(x), x.imag) if _is_complex(x) else jnp.sqrt(x)


def rsqrt(x: Array) -> Array:
    return 1 / sqrt(x) if _is_complex(x) else lax.rsqrt(x)


def asin(x: Array) -> Array:
    return _imaginary_as(jnp.arcsin(x), x.imag) if _is_complex(x) else jnp.arcsin(x)


def acos(x: Array) -> Array:
    return _imaginary_as(jnp.arccos(x), -x.imag) if _is_complex(x) else jnp.arccos(x)


def asinh(x: Array) -> Array:
    y = jnp.arcsinh(x)
    return lax.complex(jnp.copysign(y.real, x.real), y.imag) if _is_complex(x) else y


def acosh(x: Array) -> Array:
    return _imaginary_as(jnp.arccosh(x), x.imag) if _is_complex(x) else jnp.arccosh(x)
