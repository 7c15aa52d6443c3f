"""Pointwise ops of three operands: selection, clamping, interpolation, fused multiply-adds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_core.dtypes import cast, compute, compute_float, op_math, promote, result_type
from tpu_core.lowering.registry import lowering

Array = jax.Array


@lowering("aten.where.self", "prims.where.default")
def where(condition: Array, self: Any, other: Any) -> Array:
    a, b = promote(self, other)
    return jnp.where(cast(condition, np.bool_), a, b)


@lowering("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(self: Array, mask: Array, value: Any) -> Array:
    return jnp.where(cast(mask, np.bool_), cast(value, self.dtype), self)


@lowering("aten.clamp.default", "aten.clamp.Tensor")
def clamp(self: Array, min: Any = None, max: Any = None) -> Array:
    """NaN stays NaN; where the bounds cross, the upper one wins."""
    dtype = result_type(self, min, max)
    value = cast(self, dtype)
    if min is not None:
        value = jnp.maximum(value, cast(min, dtype))
    if max is not None:
        value = jnp.minimum(value, cast(max, dtype))
    return value


@lowering("aten.clamp_min.default", "aten.clamp_min.Tensor")
def clamp_min(self: Array, min: Any) -> Array:
    return clamp(self, min)


@lowering("aten.clamp_max.default", "aten.clamp_max.Tensor")
def clamp_max(self: Array, max: Any) -> Array:
    return clamp(self, None, max)


def interpolate(start: Array, end: Array, weight: Array) -> Array:
    """Linear interpolation, exact at both ends (aten/src/ATen/native/Lerp.h)."""
    span = end - start
    return jnp.where(jnp.abs(weight) < 0.5, start + weight * span, end - span * (1 - weight))


@lowering("aten.lerp.Scalar", "aten.lerp.Tensor")
def lerp(self: Array, end: Array, weight: Any) -> Array:
    dtype = op_math(self.dtype)
    return interpolate(cast(self, dtype), cast(end, dtype), cast(weight, dtype))


@lowering("aten.addcmul.default")
def addcmul(self: Array, tensor1: Array, tensor2: Array, *, value: Any = 1) -> Array:
    base, a, b = compute(self, tensor1, tensor2)
    if isinstance(value, int) and value == 1:
        return base + a * b
    return base + cast(value, base.dtype) * a * b


@lowering("aten.addcdiv.default")
def addcdiv(self: Array, tensor1: Array, tensor2: Array, *, value: Any = 1) -> Array:
    base, a, b = compute_float(self, tensor1, tensor2)
    if isinstance(value, int) and value == 1:
        return base + a / b
    return base + cast(value, base.dtype) * a / b
