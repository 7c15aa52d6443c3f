"""Lowerings of sorting and of the selections that rest on it.

NaN is greater than every number, as in ATen; equal elements keep their order, asked or not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, is_float
from tpu_core.lowering.loss import pick
from tpu_core.lowering.reduction import axes_of, keep, sum_over
from tpu_core.lowering.registry import lowering

Pair = tuple[jax.Array, jax.Array]


def _single(x: jax.Array) -> Pair:
    """Any selection from a 0-d tensor."""
    return x, jnp.zeros((), np.int64)


def sorted_pair(x: jax.Array, axis: int, descending: bool = False) -> Pair:
    """``x`` sorted along ``axis`` and the indices, computed in int32."""
    keys = x.astype(np.uint8) if x.dtype == np.bool_ else x
    position = lax.broadcasted_iota(np.int32, x.shape, axis)
    operands = (keys, position)
    if descending:
        # A stable descending sort: reversed before and after, equal elements keep their order.
        operands = tuple(lax.rev(o, (axis,)) for o in operands)
    values, index = lax.sort(operands, dimension=axis, num_keys=1, is_stable=True)
    if descending:
        values, index = lax.rev(values, (axis,)), lax.rev(index, (axis,))
    return values.astype(x.dtype), index


@lowering("aten.sort.default")
def sort(x: jax.Array, dim: int = -1, descending: bool = False) -> Pair:
    return sorted_pair(x, dim % x.ndim, descending) if x.ndim else _single(x)


@lowering("aten.sort.stable")
def sort_stable(
    x: jax.Array, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> Pair:
    return sort(x, dim, descending)


_NAN_SMALLEST = np.uint32(0xFFC00000)  # sorts below -inf in the total order that top_k uses
_SIGN = np.uint32(0x80000000)


def _top_float(x: jax.Array, k: int, largest: bool) -> Pair:
    """``top_k`` of floats, as float32 where that is exact: only float32 has a kernel on the CPU."""
    keys = x if x.dtype == np.float64 else x.astype(np.float32)
    nan = x != x
    if largest:
        return lax.top_k(jnp.where(nan, np.asarray(np.nan, keys.dtype), keys), k)
    if keys.dtype == np.float64:
        values, index = lax.top_k(-jnp.where(nan, np.asarray(np.nan), keys), k)
        return -values, index
    bits = lax.bitcast_convert_type(keys, np.uint32) ^ _SIGN
    bits = jnp.where(nan, _NAN_SMALLEST, bits)
    values, index = lax.top_k(lax.bitcast_convert_type(bits, np.float32), k)
    return -values, index


@lowering("aten.topk.default")
def topk(x: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Pair:
    """The result is in order, asked or not."""
    if not x.ndim:
        return _single(x)
    axis = dim % x.ndim
    rows = jnp.moveaxis(x, axis, -1)
    if not rows.size or not k:
        values = jnp.zeros((*rows.shape[:-1], k), x.dtype)
        index = jnp.zeros(values.shape, np.int32)
    elif is_float(x.dtype) or x.dtype.itemsize < 4:
        values, index = _top_float(rows, k, largest)
    elif largest:
        values, index = lax.top_k(rows, k)
    else:
        values, index = lax.top_k(~rows, k)  # the complement reverses the order of integers
        values = ~values
    return jnp.moveaxis(values.astype(x.dtype), -1, axis), jnp.moveaxis(index, -1, axis)


def _select(x: jax.Array, dim: int, keepdim: bool, rank: int | jax.Array) -> Pair:
    """Value and index of the element of a rank along ``dim``, the same rank or one a slice."""
    axis = dim % x.ndim
    values, index = sorted_pair(x, axis)
    if isinstance(rank, int):
        pair = tuple(lax.index_in_dim(v, rank, axis, keepdims=False) for v in (values, index))
    else:
        pair = tuple(pick(v, rank, axis) for v in (values, index))
    value, position = (keep(v, x, (axis,), keepdim) for v in pair)
    return value, position


@lowering("aten.kthvalue.default")
def kthvalue(x: jax.Array, k: int, dim: int = -1, keepdim: bool = False) -> Pair:
    return _select(x, dim, keepdim, k - 1) if x.ndim else _single(x)


def _nan_count(x: jax.Array, dim: int) -> jax.Array:
    return sum_over((x != x).astype(np.int32), axes_of(x, dim))


@lowering("aten.median.dim")
def median_dim(x: jax.Array, dim: int, keepdim: bool = False) -> Pair:
    """The lower median; a slice with a NaN gives its first NaN."""
    if not x.ndim:
        return _single(x)
    count = x.shape[dim]
    # Divided in the program: a number that follows from the size, so that padded arrays serve it.
    rank = lax.div(cast(count - 1, np.int32), np.int32(2))
    if is_float(x.dtype):
        # NaNs are sorted last and keep their order.
        nans = _nan_count(x, dim)
        rank = jnp.where(nans > 0, cast(count, np.int32) - nans, rank)
    return _select(x, dim, keepdim, rank)


@lowering("aten.nanmedian.dim")
def nanmedian_dim(x: jax.Array, dim: int, keepdim: bool = False) -> Pair:
    if not x.ndim:
        return _single(x)
    if not is_float(x.dtype):
        return median_dim(x, dim, keepdim)
    # Of NaNs only: rank 0, the first of them.
    rank = jnp.maximum((x.shape[dim] - _nan_count(x, dim) - 1) // 2, 0)
    return _select(x, dim, keepdim, rank)


def _flat_median(x: jax.Array, ignore_nan: bool) -> jax.Array:
    flat = lax.reshape(x, (x.size,))
    if not x.size:
        # ATen gives NaN, and the least value for integers (Sorting.cpp, median_impl).
        low = np.nan if is_float(x.dtype) else np.iinfo(x.dtype).min
        return jnp.asarray(low, x.dtype)
    return (nanmedian_dim if ignore_nan else median_dim)(flat, 0)[0]


@lowering("aten.median.default")
def median(x: jax.Array) -> jax.Array:
    return _flat_median(x, ignore_nan=False)


@lowering("aten.nanmedian.default")
def nanmedian(x: jax.Array) -> jax.Array:
    return _flat_median(x, ignore_nan=True)


@lowering("aten.mode.default")
def mode(x: jax.Array, dim: int = -1, keepdim: bool = False) -> Pair:
    """The most frequent value, the least of several, and the last index that holds it."""
    if not x.ndim:
        return _single(x)
    axis = dim % x.ndim
    values, index = sorted_pair(x, axis)
    count = x.shape[axis]
    before = lax.slice_in_dim(values, 0, count - 1, axis=axis)
    after = lax.slice_in_dim(values, 1, count, axis=axis)
    pad = [(0, 0, 0)] * x.ndim
    pad[axis] = (1, 0, 0)
    starts = lax.pad(before != after, np.True_, pad)
    position = lax.broadcasted_iota(np.int32, x.shape, axis)
    start = lax.cummax(jnp.where(starts, position, np.int32(0)), axis=axis)
    # Counted up to each element, a run's last element has the run's length.
    longest = lax.argmax(position - start, axis, np.int32)
    value, last = (pick(v, longest, axis) for v in (values, index))
    return keep(value, x, (axis,), keepdim), keep(last, x, (axis,), keepdim)


@lowering("aten.histc.default")
def histc(x: jax.Array, bins: int = 100, min: float = 0, max: float = 0) -> jax.Array:
    """Counts in equal bins from ``min`` to ``max``, or over the data's range where they are equal.

    Elements outside, NaN among them, are dropped. Data that are infinite or NaN, over whose range
    ATen refuses to count, give zeros: the check says so.
    """
    flat = lax.reshape(x, (x.size,))
    low, high = cast(min, x.dtype), cast(max, x.dtype)
    if x.size:
        whole = low == high
        low = jnp.where(whole, lax.reduce_min(flat, (0,)), low)
        high = jnp.where(whole, lax.reduce_max(flat, (0,)), high)
    one = jnp.asarray(low == high).astype(x.dtype)
    low, high = low - one, high + one
    inside = (flat >= low) & (flat <= high)
    slot = (flat - low) * np.asarray(bins, x.dtype) / (high - low)
    slot = jnp.minimum(jnp.where(inside, slot, 0).astype(np.int32), bins - 1)
    slot = jnp.where(inside, slot, np.int32(bins))
    return jnp.zeros((bins,), x.dtype).at[slot].add(np.ones((), x.dtype), mode="drop")
