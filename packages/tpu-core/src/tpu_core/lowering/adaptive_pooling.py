"""Adaptive average and max pooling, and fractional max pooling.

The windows are those of aten/src/ATen/native/AdaptivePooling.h. Where they tile the input evenly a
reshape makes them a dim of their own; else averages are maps along one axis at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, is_float, op_math
from tpu_core.lowering.pooling import lowest, scatter_planes
from tpu_core.lowering.registry import lowering
from tpu_core.lowering.tables import are_inputs, table
from tpu_core.lowering.weighted_gather import WeightedGather, apply, candidates


def _bounds(size: int, outputs: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Start and end of each window."""
    i = np.arange(outputs)
    return (i * size) // outputs, -((-(i + 1) * size) // outputs)


def _window_map(size: int, outputs: int) -> WeightedGather:
    """Sums over the windows along one axis."""
    start, stop = _bounds(size, outputs)
    width = int((stop - start).max(initial=0))
    index = start[:, None] + np.arange(width)[None]
    inside = index < stop[:, None]
    index = np.where(inside, index, start[:, None])
    # How many elements a window has depends on the size.
    return WeightedGather(index, inside.astype(np.float64), size, are_inputs(), terms_vary=True)


def _counts(sizes: Sequence[int], outputs: Sequence[int], dtype: Any) -> jax.Array:
    total = jnp.ones((), dtype)
    for i, (size, n) in enumerate(zip(sizes, outputs)):
        start, stop = _bounds(size, n)
        counts = (stop - start).astype(dtype)
        if n and _even(sizes, outputs):
            total = total * jnp.asarray(counts[0])
        else:
            shape = [1] * len(sizes)
            shape[i] = -1
            total = total * table(counts.reshape(shape), dtype)
    return total


def _even(sizes: Sequence[int], outputs: Sequence[int]) -> bool:
    """Return whether a reshape makes the windows, which one window of each size is."""
    if are_inputs():
        return all(n == 1 for n in outputs)
    return all(n > 0 and size % n == 0 for size, n in zip(sizes, outputs))


def _split(x: jax.Array, outputs: Sequence[int]) -> jax.Array:
    """Each of the last dims as (windows, positions)."""
    lead = x.shape[: x.ndim - len(outputs)]
    pairs = [(n, size // n) for n, size in zip(outputs, x.shape[len(lead) :])]
    return x.reshape(*lead, *(v for pair in pairs for v in pair))


def _adaptive_avg_pool(x: jax.Array, outputs: Sequence[int]) -> jax.Array:
    rank = len(outputs)
    lead, sizes = x.ndim - rank, x.shape[x.ndim - rank :]
    x = cast(x, op_math(x.dtype))
    if _even(sizes, outputs):
        axes = tuple(lead + 2 * i + 1 for i in range(rank))
        total = jnp.sum(_split(x, outputs), axis=axes)
    else:
        total = x
        for i, (size, n) in enumerate(zip(sizes, outputs)):
            total = apply(total, lead + i, _window_map(size, n))
    return total / _counts(sizes, outputs, total.dtype)


def _adaptive_avg_pool_backward(grad: jax.Array, x: jax.Array, rank: int) -> jax.Array:
    sizes, outputs = x.shape[x.ndim - rank :], grad.shape[grad.ndim - rank :]
    lead = x.ndim - rank
    grad = cast(grad, op_math(grad.dtype))
    grad = grad / _counts(sizes, outputs, grad.dtype)
    if _even(sizes, outputs):
        grad = lax.expand_dims(grad, [lead + 2 * i + 1 for i in range(rank)])
        pairs = [(n, size // n) for n, size in zip(outputs, sizes)]
        spread = jnp.broadcast_to(grad, (*x.shape[:lead], *(v for pair in pairs for v in pair)))
        return spread.reshape(x.shape)
    for i, (size, n) in enumerate(zip(sizes, outputs)):
        grad = apply(grad, lead + i, _window_map(size, n).transpose())
    return grad


def pick_maximum(
    values: jax.Array, positions: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Maximum over ``axes`` and its position: the least one that holds it, of NaN the greatest."""
    best = jnp.max(values, axis=axes, keepdims=True)
    none, last = np.int32(-1), np.int32(np.iinfo(np.int32).max)
    where = jnp.min(jnp.where(values == best, positions, last), axis=axes)
    best = jnp.squeeze(best, axes)
    if is_float(values.dtype):
        where_nan = jnp.max(jnp.where(jnp.isnan(values), positions, none), axis=axes)
        where = jnp.where(where_nan >= 0, where_nan, where)
    return best, where


def _adaptive_max_pool(x: jax.Array, outputs: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    rank = len(outputs)
    lead, sizes = x.ndim - rank, x.shape[x.ndim - rank :]
    if 0 in outputs or 0 in x.shape:
        shape = (*x.shape[:lead], *outputs)
        return jnp.zeros(shape, x.dtype), jnp.zeros(shape, np.int32)
    if are_inputs() and not _even(sizes, outputs):
        return _maximum_by_tables(x, outputs)
    axes = tuple(lead + 2 * i + 1 for i in range(rank))
    positions, inside = jnp.zeros((), np.int32), np.ones((1,) * 2 * rank, np.bool_)
    for i, (size, n) in enumerate(zip(sizes, outputs)):
        axis = lead + 2 * i
        window = [1] * 2 * rank
        if _even((size,), (n,)):  # no table, so that padded arrays serve other sizes
            index = lax.iota(np.int32, size).reshape(n, size // n)
            x = x.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
            window[2 * i : 2 * i + 2] = index.shape
        else:
            m = _window_map(size, n)
            index = jnp.asarray(m.index, np.int32)
            x = jnp.take(x, index, axis=axis, mode="clip")
            window[2 * i : 2 * i + 2] = index.shape
            inside = inside & (m.weight != 0).reshape(window)
        step = np.int32(math.prod(sizes[i + 1 :]))
        positions = positions + (index * step).reshape(window)
    if not inside.all():
        x = jnp.where(inside, x, lowest(x.dtype))
        positions = jnp.where(inside, positions, np.int32(np.iinfo(np.int32).max))
    return pick_maximum(x, positions, axes)


def _maximum_by_tables(x: jax.Array, outputs: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """As `_adaptive_max_pool`, by ops that do not depend on the sizes: one dim after the other."""
    lead = x.ndim - len(outputs)
    sizes = x.shape[lead:]
    positions = jnp.zeros(x.shape, np.int32)
    for i in reversed(range(len(outputs))):
        axis, step = lead + i, math.prod(sizes[i + 1 :])
        own = lax.broadcasted_iota(np.int32, positions.shape, axis)
        m = _window_map(sizes[i], outputs[i])
        values, weight = candidates(x, axis, m)
        there, _ = candidates(positions + own * step, axis, m)
        inside = table((weight != 0).reshape(*weight.shape, *(1,) * (x.ndim - axis - 1)), bool)
        values = jnp.where(inside, values, lowest(x.dtype))
        there = jnp.where(inside, there, np.int32(np.iinfo(np.int32).max))
        x, positions = pick_maximum(values, there, (axis + 1,))
    return x, positions


@lowering("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def adaptive_avg_pool(x: jax.Array, output_size: Sequence[int]) -> jax.Array:
    return _adaptive_avg_pool(x, output_size)


@lowering("aten._adaptive_avg_pool2d_backward.default")
def adaptive_avg_pool2d_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    return _adaptive_avg_pool_backward(grad, x, 2)


@lowering("aten._adaptive_avg_pool3d_backward.default")
def adaptive_avg_pool3d_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    return _adaptive_avg_pool_backward(grad, x, 3)


@lowering("aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default")
def adaptive_max_pool(x: jax.Array, output_size: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    return _adaptive_max_pool(x, output_size)


def _scatter_backward(rank: int) -> Any:
    def backward(grad: jax.Array, x: jax.Array, indices: jax.Array) -> jax.Array:
        grad = cast(grad, op_math(grad.dtype))
        return scatter_planes(grad, indices, x.shape[x.ndim - rank :], rank, add=True)

    return backward


def _fractional_starts(sample: jax.Array, size: int, outputs: int, kernel: int) -> jax.Array:
    """Starts of the windows along one dim (``generate_intervals``, FractionalMaxPooling.h)."""
    last = np.int32(size - kernel)
    if outputs == 1:
        return jnp.full((*sample.shape, 1), last)
    alpha = jnp.asarray((size - kernel) / (outputs - 1), sample.dtype)
    i = jnp.arange(outputs, dtype=np.int32)
    sample = sample[..., None]
    starts = ((cast(i, sample.dtype) + sample) * alpha).astype(np.int32)
    starts = starts - (sample * alpha).astype(np.int32)
    return jnp.where(i == outputs - 1, last, starts)


def _fractional_max_pool(rank: int) -> Any:
    def forward(
        x: jax.Array, kernel_size: Sequence[int], output_size: Sequence[int], samples: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """``samples`` is ``[N, C, rank]``, last spatial dim first in 2-D (``...Pool2d.cpp``)."""
        if 0 in x.shape:
            empty = (*x.shape[: x.ndim - rank], *output_size)
            return jnp.zeros(empty, x.dtype), jnp.zeros(empty, np.int32)
        batched = x if x.ndim == rank + 2 else x[None]
        sizes = batched.shape[2:]
        flat: Any = jnp.zeros((1,) * (2 + 2 * rank), np.int32)
        for i, (size, n, k) in enumerate(zip(sizes, output_size, kernel_size)):
            sample = samples[..., rank - 1 - i] if rank == 2 else samples[..., i]
            starts = _fractional_starts(sample, size, n, k)
            rows = starts[..., None] + jnp.arange(k, dtype=np.int32)
            shape = [*starts.shape[:2], *(1,) * 2 * rank]
            shape[2 + i], shape[2 + rank + i] = n, k
            flat = flat + rows.reshape(shape) * cast(math.prod(sizes[i + 1 :]), np.int32)
        planes = batched.reshape(*batched.shape[:2], -1)
        windows = flat.shape
        index = flat.reshape(*windows[:2], -1)
        values = jnp.take_along_axis(planes, index, axis=2, mode="clip").reshape(windows)
        best, where = pick_maximum(values, flat, tuple(range(2 + rank, 2 + 2 * rank)))
        return (best, where) if x.ndim == rank + 2 else (best[0], where[0])

    return forward


def _fractional_max_pool_backward(rank: int) -> Any:
    scatter = _scatter_backward(rank)

    def backward(
        grad: jax.Array,
        x: jax.Array,
        kernel_size: Sequence[int],
        output_size: Sequence[int],
        indices: jax.Array,
    ) -> jax.Array:
        return scatter(grad, x, indices)

    return backward


for _rank in (2, 3):
    lowering(f"aten.adaptive_max_pool{_rank}d_backward.default")(_scatter_backward(_rank))
    lowering(f"aten.fractional_max_pool{_rank}d.default")(_fractional_max_pool(_rank))
    lowering(f"aten.fractional_max_pool{_rank}d_backward.default")(
        _fractional_max_pool_backward(_rank)
    )
