"""Sliding windows and their adjoint: ``unfold``, ``im2col``, ``col2im``."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.gather_scatter import gather_slices, scatter_slices
from tpu_core.lowering.registry import lowering
from tpu_core.lowering.slicing import place

# Up to this many shifted slices or pads fuse into one loop; beyond it one gather or scatter.
_UNROLL = 16


def _positions(count: int, size: int, step: int, dilation: int) -> jax.Array:
    first = lax.broadcasted_iota(np.int32, (count, size), 0) * np.int32(step)
    return first + lax.broadcasted_iota(np.int32, (count, size), 1) * np.int32(dilation)


def windows(x: jax.Array, dim: int, size: int, step: int, dilation: int = 1) -> jax.Array:
    """Windows of ``x`` along ``dim``: their number stands at ``dim``, their size after it."""
    count = (
        (x.shape[dim] - dilation * (size - 1) - 1) // step + 1 if size else x.shape[dim] // step + 1
    )
    shape = (*x.shape[:dim], count, size, *x.shape[dim + 1 :])
    if 0 in shape:
        return jnp.zeros(shape, x.dtype)
    if step == size and dilation == 1:
        return lax.slice_in_dim(x, 0, count * size, axis=dim).reshape(shape)
    if size > _UNROLL:
        return gather_slices(x, (dim,), [_positions(count, size, step, dilation)], dim)
    span = (count - 1) * step + 1
    shifted = [
        lax.slice_in_dim(x, k * dilation, k * dilation + span, step, dim) for k in range(size)
    ]
    return jnp.stack(shifted, axis=dim + 1)


def overlap_add(x: jax.Array, dim: int, length: int, step: int, dilation: int = 1) -> jax.Array:
    """The adjoint of `windows`: windows added back into ``length`` elements along ``dim``."""
    count, size = x.shape[dim], x.shape[dim + 1]
    shape = (*x.shape[:dim], length, *x.shape[dim + 2 :])
    if x.size == 0:
        return jnp.zeros(shape, x.dtype)
    if step == size and dilation == 1:
        flat = x.reshape(*x.shape[:dim], count * size, *x.shape[dim + 2 :])
        return place(flat, length, dim, 0)
    if size > _UNROLL:
        position = _positions(count, size, step, dilation)
        return scatter_slices(jnp.zeros(shape, x.dtype), (dim,), [position], x, dim, "add")
    total = None
    for k in range(size):
        part = lax.index_in_dim(x, k, dim + 1, keepdims=False)
        part = place(part, length, dim, k * dilation, step)
        total = part if total is None else total + part
    return total


@lowering("aten.unfold_backward.default")
def unfold_backward(
    grad_in: jax.Array, input_sizes: Sequence[int], dim: int, size: int, step: int
) -> jax.Array:
    if not input_sizes:
        return grad_in.reshape(())
    dim %= len(input_sizes)
    grad = cast(jnp.moveaxis(grad_in, -1, dim + 1), op_math(grad_in.dtype))
    return cast(overlap_add(grad, dim, input_sizes[dim], step), grad_in.dtype)


@lowering("aten.im2col.default")
def im2col(
    x: jax.Array,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> jax.Array:
    """``[*, C, H, W]`` to ``[*, C * kh * kw, windows]``, one dimension after the other."""
    *batch, channels, _, _ = x.shape
    n = len(batch)
    pad = [(0, 0)] * (n + 1) + [(p, p) for p in padding]
    x = jnp.pad(x, pad)
    x = windows(x, n + 2, kernel_size[1], stride[1], dilation[1])
    x = windows(x, n + 1, kernel_size[0], stride[0], dilation[0])  # *, C, oh, kh, ow, kw
    height, width = x.shape[n + 1], x.shape[n + 3]
    x = x.transpose(*range(n + 1), n + 2, n + 4, n + 1, n + 3)
    return x.reshape(*batch, channels * kernel_size[0] * kernel_size[1], height * width)


@lowering("aten.col2im.default")
def col2im(
    x: jax.Array,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> jax.Array:
    """The adjoint of `im2col`: overlapping windows are summed."""
    *batch, rows, _ = x.shape
    n, (kh, kw) = len(batch), kernel_size
    padded = [size + 2 * p for size, p in zip(output_size, padding)]
    counts = [
        (length - d * (k - 1) - 1) // s + 1
        for length, d, k, s in zip(padded, dilation, kernel_size, stride)
    ]
    dtype = x.dtype
    x = cast(x, op_math(dtype)).reshape(*batch, rows // (kh * kw), kh, kw, *counts)
    x = x.transpose(*range(n + 1), n + 3, n + 1, n + 4, n + 2)  # *, C, oh, kh, ow, kw
    x = overlap_add(x, n + 3, padded[1], stride[1], dilation[1])
    x = overlap_add(x, n + 1, padded[0], stride[0], dilation[0])
    for axis, (p, size) in enumerate(zip(padding, output_size), n + 1):
        x = lax.slice_in_dim(x, p, p + size, axis=axis)
    return cast(x, dtype)
