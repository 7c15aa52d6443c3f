"""Fake quantization: values rounded to a grid of integers and scaled back, in training."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.registry import lowering

Array = jax.Array


# The kernels for channels convert to 64-bit integers: what none stands for becomes the least one.
_LEAST = -(2.0**63)


def _on_grid(
    x: Array, scale: Any, zero_point: Any, low: int, high: int, wraps: bool = False
) -> tuple[Array, Array]:
    """Values on the grid, and a mask of those that lie within it.

    As aten/src/ATen/native/quantized/cpu/kernels/QuantizedOpKernels.cpp computes them.

    Args:
        x: Values.
        scale: Distance of the grid's points, in float32.
        zero_point: Place of 0; where it is a float, it is added before the value is rounded.
        low, high: First and last place.
        wraps: Whether a value beyond the 64-bit integers takes the first place, as NaN does.
    """
    dtype = op_math(x.dtype)
    scale, zero = cast(scale, np.float32), cast(zero_point, dtype)
    scaled = cast(x, dtype) * cast(np.float32(1) / scale, dtype)
    is_float = jnp.issubdtype(jnp.result_type(zero_point), np.floating)
    place = jnp.round(zero + scaled) if is_float else zero + jnp.round(scaled)
    is_valid = jnp.abs(place) < -_LEAST if wraps else ~jnp.isnan(place)
    place = jnp.where(is_valid, place, _LEAST)
    inside = (place >= low) & (place <= high)
    value = (jnp.clip(place, low, high) - zero) * cast(scale, dtype)
    return cast(value, x.dtype), inside


@lowering("aten.fake_quantize_per_tensor_affine_cachemask.default")
def per_tensor(
    x: Array, scale: Any, zero_point: int, quant_min: int, quant_max: int
) -> tuple[Array, Array]:
    return _on_grid(x, scale, np.int64(zero_point), quant_min, quant_max)


@lowering("aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default")
def per_tensor_qparams(
    x: Array, scale: Array, zero_point: Array, enabled: Array, quant_min: int, quant_max: int
) -> tuple[Array, Array]:
    scale, zero, on = (v.reshape(-1)[0] for v in (scale, zero_point, enabled))
    value, inside = _on_grid(x, scale, zero.astype(np.int64), quant_min, quant_max)
    return jnp.where(on != 0, value, x), inside | (on == 0)


@lowering("aten.fake_quantize_per_channel_affine_cachemask.default")
def per_channel(
    x: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int
) -> tuple[Array, Array]:
    shape = [x.shape[d] if d == axis % x.ndim else 1 for d in range(x.ndim)]
    scale = scale.reshape(shape)
    return _on_grid(x, scale, zero_point.reshape(shape), quant_min, quant_max, True)
