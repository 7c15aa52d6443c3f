"""Writes through static views: ``*_scatter`` and the backward ops of select, slice and diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast
from tpu_core.lowering.gather_scatter import scatter_slices
from tpu_core.lowering.registry import lowering


def slice_bounds(size: int, start: int | None, end: int | None, step: int) -> tuple[int, int, int]:
    """First index, end, and number of elements of ``x[start:end:step]``, as PyTorch clamps them."""
    first, last = _clamped(0 if start is None else start, size), size
    if end is not None:
        last = _clamped(end, size)
    return first, last, max((last - first + step - 1) // step, 0)


def _clamped(index: int, size: int) -> int:
    return min(max(index + size if index < 0 else index, 0), size)


def place(x: jax.Array, size: int, dim: int, start: int, step: int = 1) -> jax.Array:
    """Zeros of length ``size`` in ``dim`` with ``x`` at ``start, start + step, ...``."""
    length = x.shape[dim]
    config = [(0, 0, 0)] * x.ndim
    used = (length - 1) * step + 1 if length else 0
    config[dim] = (start, size - start - used, step - 1)
    return lax.pad(x, np.array(0, x.dtype), config)


@lowering("aten.select_backward.default")
def select_backward(
    grad_output: jax.Array, input_sizes: Sequence[int], dim: int, index: int | jax.Array
) -> jax.Array:
    dim %= len(input_sizes)
    start = _from_front(index, input_sizes[dim])
    return _written(input_sizes, jnp.expand_dims(grad_output, dim), dim, start)


@lowering("aten.slice_backward.default")
def slice_backward(
    grad_output: jax.Array,
    input_sizes: Sequence[int],
    dim: int,
    start: int | jax.Array,
    end: int | jax.Array,
    step: int,
) -> jax.Array:
    """The length of the gradient says where the slice ends."""
    dim %= len(input_sizes)
    if grad_output.size == 0:
        return jnp.zeros(input_sizes, grad_output.dtype)
    length = grad_output.shape[dim]
    if step != 1:
        grad_output = place(grad_output, (length - 1) * step + 1, dim, 0, step)
    return _written(input_sizes, grad_output, dim, _from_front(start, input_sizes[dim]))


def _from_front(index: Any, size: int) -> Any:
    """A start that may be a run-time number, which counts from the end where it is negative."""
    if isinstance(index, jax.Array):
        return jnp.maximum(jnp.where(index < 0, index + size, index), 0)
    return _clamped(index, size)


def _written(sizes: Sequence[int], grad: jax.Array, dim: int, start: Any) -> jax.Array:
    """Zeros with a gradient in a window.

    XLA adds such windows to a sum in place, where it would compute the whole of each padded one.
    """
    return _write(jnp.zeros(sizes, grad.dtype), grad, dim, start)


def _write(x: jax.Array, src: jax.Array, dim: int, start: int) -> jax.Array:
    at: list[Any] = [np.int32(0)] * x.ndim
    at[dim] = cast(start, np.int32 if x.shape[dim] < 2**31 else np.int64)
    return lax.dynamic_update_slice(x, cast(src, x.dtype), at)


@lowering("aten.select_scatter.default")
def select_scatter(x: jax.Array, src: jax.Array, dim: int, index: int) -> jax.Array:
    dim %= x.ndim
    shape = x.shape[:dim] + (1,) + x.shape[dim + 1 :]
    src = jnp.broadcast_to(src, x.shape[:dim] + x.shape[dim + 1 :]).reshape(shape)
    return x if x.size == 0 else _write(x, src, dim, index % x.shape[dim])


@lowering("aten.slice_scatter.default")
def slice_scatter(
    x: jax.Array,
    src: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    dim %= x.ndim
    size = x.shape[dim]
    first, last, length = slice_bounds(size, start, end, step)
    if length == 0 or x.size == 0:
        return x
    src = jnp.broadcast_to(src, x.shape[:dim] + (length,) + x.shape[dim + 1 :])
    if step == 1:
        return _write(x, src, dim, first)
    position = lax.broadcasted_iota(np.int32, x.shape, dim)
    inside = (position >= first) & (position < last)
    inside &= lax.rem(position - cast(first, np.int32), np.int32(step)) == 0
    return jnp.where(inside, place(cast(src, x.dtype), size, dim, first, step), x)


def _diagonal_mask(sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> jax.Array:
    row = lax.broadcasted_iota(np.int32, tuple(sizes), dim1)
    column = lax.broadcasted_iota(np.int32, tuple(sizes), dim2)
    return column - row == offset


def _place_diagonal(
    diagonal: jax.Array, sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> jax.Array:
    """The diagonal's values broadcast over ``dim2``, so that `_diagonal_mask` picks them."""
    placed = place(diagonal, sizes[dim1], diagonal.ndim - 1, max(-offset, 0))
    # The diagonal is the last dimension: put it at dim1, and a dimension of 1 at dim2.
    rest = [d for d in range(len(sizes)) if d not in (dim1, dim2)]
    return lax.broadcast_in_dim(placed, tuple(sizes), (*rest, dim1))


@lowering("aten.diagonal_backward.default")
def diagonal_backward(
    grad_output: jax.Array, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> jax.Array:
    rank = len(input_sizes)
    zeros = jnp.zeros(input_sizes, grad_output.dtype)
    return diagonal_scatter(zeros, grad_output, offset, dim1 % rank, dim2 % rank)


@lowering("aten.diagonal_scatter.default")
def diagonal_scatter(
    x: jax.Array, src: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> jax.Array:
    dim1, dim2 = dim1 % x.ndim, dim2 % x.ndim
    if src.size == 0:
        return x
    mask = _diagonal_mask(x.shape, offset, dim1, dim2)
    return jnp.where(mask, _place_diagonal(cast(src, x.dtype), x.shape, offset, dim1, dim2), x)


def strided_index(size: Sequence[int], stride: Sequence[int], offset: int) -> jax.Array:
    """Flat positions of a strided view's elements."""
    reach = offset + sum((n - 1) * s for n, s in zip(size, stride))
    dtype = np.int32 if reach < 2**31 else np.int64
    position = jnp.full(tuple(size), offset, dtype)
    for d, step in enumerate(stride):
        position += lax.broadcasted_iota(dtype, tuple(size), d) * np.array(step, dtype)
    return position


@lowering("aten.as_strided_scatter.default")
def as_strided_scatter(
    x: jax.Array,
    src: jax.Array,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> jax.Array:
    """Strides are those of a contiguous ``x``: a lowering sees values, not memory."""
    position = strided_index(size, stride, storage_offset or 0).reshape(-1)
    src = cast(jnp.broadcast_to(src, tuple(size)), x.dtype).reshape(-1)
    return scatter_slices(x.reshape(-1), (0,), [position], src, 0, "set").reshape(x.shape)
