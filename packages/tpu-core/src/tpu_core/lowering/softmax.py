"""Lowerings of softmax, log_softmax, their masked forms and their backward ops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.reduction import sum_over
from tpu_core.lowering.registry import lowering


def _axes(x: jax.Array, dim: int) -> tuple[int, ...]:
    return (dim % x.ndim,) if x.ndim else ()


def _shifted(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """``x`` less its maximum, which keeps every exponential in range."""
    if not x.size:
        return x
    return x - lax.expand_dims(lax.reduce_max(x, axes), axes)


def softmax_over(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Softmax in ``x``'s own dtype; a row of -inf gives NaN, as in ATen."""
    e = lax.exp(_shifted(x, axes))
    return e * lax.reciprocal(sum_over(e, axes, keepdim=True))  # one division a row


@lowering("aten._softmax.default")
def softmax(x: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    return softmax_over(cast(x, op_math(x.dtype)), _axes(x, dim))


@lowering("aten._log_softmax.default")
def log_softmax(x: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    axes = _axes(x, dim)
    shifted = _shifted(cast(x, op_math(x.dtype)), axes)
    return shifted - lax.log(sum_over(lax.exp(shifted), axes, keepdim=True))


@lowering("aten._safe_softmax.default")
def safe_softmax(x: jax.Array, dim: int, dtype: Any = None, *, out: Any) -> jax.Array:
    """Softmax whose rows of -inf give zeros."""
    axes = _axes(x, dim)
    x = cast(x, op_math(out[0].dtype))
    dead = lax.expand_dims(lax.reduce_and(x == -np.inf, axes), axes)
    return jnp.where(dead, jnp.zeros((), x.dtype), softmax_over(x, axes))


@lowering("aten._softmax_backward_data.default")
def softmax_backward(grad: jax.Array, output: jax.Array, dim: int, input_dtype: Any) -> jax.Array:
    dtype = op_math(output.dtype)
    grad, output = cast(grad, dtype), cast(output, dtype)
    weighted = grad * output
    return weighted - output * sum_over(weighted, _axes(output, dim), keepdim=True)


@lowering("aten._log_softmax_backward_data.default")
def log_softmax_backward(
    grad: jax.Array, output: jax.Array, dim: int, input_dtype: Any
) -> jax.Array:
    dtype = op_math(output.dtype)
    grad, output = cast(grad, dtype), cast(output, dtype)
    return grad - lax.exp(output) * sum_over(grad, _axes(output, dim), keepdim=True)


def _masked_dim(x: jax.Array, dim: int | None) -> tuple[int, ...]:
    return _axes(x, -1 if dim is None else dim)


def _broadcast_mask(mask: jax.Array, x: jax.Array, mask_type: int | None) -> jax.Array:
    """The mask of a (B, H, L, L) score: 0 is (L, L), 1 is (B, L), 2 has the score's shape."""
    if mask_type == 1 and mask.ndim == 2 and x.ndim == 4:
        mask = lax.expand_dims(mask, (1, 2))
    return jnp.broadcast_to(cast(mask, np.bool_), x.shape)


@lowering("aten._masked_softmax.default")
def masked_softmax(
    x: jax.Array, mask: jax.Array, dim: int | None = None, mask_type: int | None = None
) -> jax.Array:
    """Softmax over the elements where ``mask`` is false; the others are zero."""
    axes = _masked_dim(x, dim)
    mask = _broadcast_mask(mask, x, mask_type)
    scores = jnp.where(mask, jnp.array(-np.inf, op_math(x.dtype)), cast(x, op_math(x.dtype)))
    return softmax_over(scores, axes)


@lowering("aten._masked_softmax_backward.default")
def masked_softmax_backward(
    grad: jax.Array, output: jax.Array, mask: jax.Array, dim: int | None = None
) -> jax.Array:
    dtype = op_math(output.dtype)
    grad, output = cast(grad, dtype), cast(output, dtype)
    zero = jnp.zeros((), dtype)
    weighted = jnp.where(cast(mask, np.bool_), zero, grad * output)
    result = weighted - output * sum_over(weighted, _masked_dim(output, dim), keepdim=True)
    return jnp.where(cast(mask, np.bool_), zero, result)
