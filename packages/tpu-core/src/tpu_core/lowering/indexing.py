"""Indexing by tensors: ``index``, ``index_put``, ``index_select``, ``gather``, ``take``, ``put``.

An index that PyTorch rejects is clamped when reading, and its write is dropped (`gather_scatter`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tpu_core.dtypes import cast
from tpu_core.lowering.gather_scatter import (
    at_least_1d,
    axis,
    clamp_index,
    combine,
    gather_elements,
    gather_slices,
    scatter_slices,
    to_index,
)
from tpu_core.lowering.registry import lowering

Indices = Sequence[jax.Array | None]


def _is_mask(index: jax.Array) -> bool:
    return index.dtype in (np.bool_, np.uint8)


def _plan(x: jax.Array, indices: Indices) -> tuple[tuple[int, ...], list[jax.Array], int]:
    """Indexed dimensions, their indices, and where the indices' dimensions stand in the result.

    They stand at the first indexed dimension if the indexed ones are adjacent, else in front.
    """
    dims = tuple(d for d, i in enumerate(indices) if i is not None)
    index = [to_index(i, x.shape[d], wrap=True) for d, i in enumerate(indices) if i is not None]
    adjacent = dims[-1] - dims[0] + 1 == len(dims)
    return dims, index, dims[0] if adjacent else 0


@lowering("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(x: jax.Array, indices: Indices) -> jax.Array:
    if any(i is not None and _is_mask(i) for i in indices):
        raise TypeError("index with a boolean mask has a data-dependent result shape.")
    if all(i is None for i in indices):
        return x
    return gather_slices(x, *_plan(x, indices))


@lowering("aten._unsafe_masked_index.default")
def unsafe_masked_index(
    x: jax.Array, mask: jax.Array, indices: Indices, fill: jax.Array | float
) -> jax.Array:
    """``where(mask, x[indices], fill)``; where the mask is false, indices may be invalid."""
    clamped = [None if i is None else clamp_index(i, n) for i, n in zip(indices, x.shape)]
    return jnp.where(mask, index(x, clamped), cast(fill, x.dtype))


@lowering(
    "aten.index_put.default",
    "aten._unsafe_index_put.default",
    "aten._index_put_impl.default",
)
def index_put(
    x: jax.Array,
    indices: Indices,
    values: jax.Array,
    accumulate: bool = False,
    unsafe: bool = False,
) -> jax.Array:
    """``x`` with ``x[indices] = values`` or ``+= values``; duplicates add up in index order."""
    kind = "add" if accumulate else "set"
    given = [d for d, i in enumerate(indices) if i is not None]
    values = cast(values, x.dtype)
    if not given:
        return combine(x, jnp.broadcast_to(values, x.shape), kind)
    if any(_is_mask(indices[d]) for d in given):
        if len(given) == 1:
            return _masked_put(x, indices[given[0]], given[0], values, kind)
        indices = _masks_to_indices(x, indices, values)
    dims, index, position = _plan(x, indices)
    shape = [n for d, n in enumerate(x.shape) if d not in dims]
    shape[position:position] = jnp.broadcast_shapes(*(i.shape for i in index))
    values = values.reshape(values.shape[max(values.ndim - len(shape), 0) :])
    return scatter_slices(x, dims, index, jnp.broadcast_to(values, shape), position, kind)


def _masked_put(
    x: jax.Array, mask: jax.Array, position: int, values: jax.Array, kind: str
) -> jax.Array:
    """``x[..., mask, ...] = values`` without indices, so that it fuses and needs no count."""
    mask = cast(mask, np.bool_)
    before, after = x.shape[:position], x.shape[position + mask.ndim :]
    rank = len(before) + 1 + len(after)
    shape = ((1,) * rank + values.shape)[values.ndim :]
    count = shape[position]
    values = values.reshape(shape)
    if count == 1:
        new = values.reshape(shape[:position] + (1,) * mask.ndim + shape[position + 1 :])
    elif values.size == 0 or x.size == 0:
        return x
    else:  # the n-th true element takes the n-th value
        order = jnp.cumsum(mask.reshape(-1), dtype=np.int32) - np.int32(1)
        new = gather_slices(values, (position,), [order.reshape(mask.shape)], position)
    mask = mask.reshape((1,) * len(before) + mask.shape + (1,) * len(after))
    return jnp.where(mask, combine(x, jnp.broadcast_to(new, x.shape), kind), x)


def _masks_to_indices(x: jax.Array, indices: Indices, values: jax.Array) -> list[jax.Array | None]:
    """Masks as integer indices; entries past the true ones are out of range, thus dropped.

    Their number is what the other indices or the values broadcast with, else the mask's size.
    """
    lengths = [i.shape[-1] for i in indices if i is not None and not _is_mask(i) and i.ndim]
    consumed = sum(1 if i is None or not _is_mask(i) else i.ndim for i in indices)
    kept = x.ndim - consumed + sum(i is None for i in indices)
    if values.ndim > kept:
        lengths.append(values.shape[values.ndim - kept - 1])
    length = max(lengths, default=1)
    result: list[jax.Array | None] = []
    for i in indices:
        if i is None or not _is_mask(i):
            result.append(i)
            continue
        first = len(result)
        fill = tuple(np.int64(n) for n in x.shape[first : first + i.ndim])
        size = length if length > 1 else i.size
        result.extend(jnp.nonzero(i, size=size, fill_value=fill))
    return result


@lowering("aten._unsafe_masked_index_put_accumulate.default")
def unsafe_masked_index_put_accumulate(
    x: jax.Array, mask: jax.Array, indices: Indices, values: jax.Array
) -> jax.Array:
    clamped = [None if i is None else clamp_index(i, n) for i, n in zip(indices, x.shape)]
    return index_put(x, clamped, jnp.where(mask, values, np.array(0, values.dtype)), True)


@lowering("aten.index_select.default")
def index_select(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    shape = x.shape
    x, index = at_least_1d(x), at_least_1d(index)
    dim = axis(dim, x.ndim)
    result = gather_slices(x, (dim,), [to_index(index, x.shape[dim])], dim)
    return result.reshape(()) if not shape else result


@lowering("aten.gather.default")
def gather(x: jax.Array, dim: int, index: jax.Array, sparse_grad: bool = False) -> jax.Array:
    return gather_elements(x, dim, index)


@lowering("aten.take.default")
def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Elements of the flattened ``x``."""
    return gather_slices(x.reshape(-1), (0,), [to_index(index, x.size, wrap=True)], 0)


@lowering("aten.put.default")
def put(x: jax.Array, index: jax.Array, source: jax.Array, accumulate: bool = False) -> jax.Array:
    """The flattened ``x`` with elements written or added to."""
    start = to_index(index.reshape(-1), x.size, wrap=True)
    kind = "add" if accumulate else "set"
    return scatter_slices(
        x.reshape(-1), (0,), [start], cast(source.reshape(-1), x.dtype), 0, kind
    ).reshape(x.shape)


@lowering("aten.masked_scatter.default")
def masked_scatter(x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    """The n-th true position takes the n-th element of the flattened ``source``."""
    shape = np.broadcast_shapes(x.shape, mask.shape)
    x, mask = jnp.broadcast_to(x, shape), jnp.broadcast_to(cast(mask, np.bool_), shape)
    order = jnp.cumsum(mask.reshape(-1), dtype=np.int32) - np.int32(1)
    new = gather_slices(source.reshape(-1), (0,), [order.reshape(shape)], 0)
    return jnp.where(mask, new, x)


@lowering("aten.masked_scatter_backward.default")
def masked_scatter_backward(
    grad_output: jax.Array, mask: jax.Array, sizes: Sequence[int]
) -> jax.Array:
    """The gradient of ``source``: the true elements of ``grad_output`` in order, then zeros."""
    size = math.prod(sizes)
    mask = jnp.broadcast_to(cast(mask, np.bool_), grad_output.shape).reshape(-1)
    order = jnp.cumsum(mask, dtype=np.int32) - np.int32(1)
    order = jnp.where(mask, order, cast(size, np.int32))  # out of range: dropped
    zeros = jnp.zeros(size, grad_output.dtype)
    return scatter_slices(zeros, (0,), [order], grad_output.reshape(-1), 0, "set").reshape(sizes)


@lowering("aten.nonzero_static.default")
def nonzero_static(x: jax.Array, size: int, fill_value: int = -1) -> jax.Array:
    if x.ndim == 0:
        return jnp.zeros((size, 0), np.int64)
    if size == 0 or x.size == 0:
        return jnp.full((size, x.ndim), fill_value, np.int64)
    found = jnp.nonzero(x, size=size, fill_value=fill_value)
    return jnp.stack(found, axis=-1).astype(np.int64)
