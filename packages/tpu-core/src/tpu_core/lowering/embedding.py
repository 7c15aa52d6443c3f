"""Embedding tables: lookup, bags, and their gradients.

An index that PyTorch rejects is clamped when reading, and its gradient is dropped.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpu_core.array_types import Float, Int, Int32, Shaped
from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.gather_scatter import gather_slices, scatter_slices, to_index
from tpu_core.lowering.registry import lowering

_SUM, _MEAN, _MAX = 0, 1, 2


def rows(table: Shaped[Array, " rows *row"], index: Int[Array, "*shape"]) -> Shaped[Array, " ..."]:
    """Rows of a table, in the shape of the index and the row."""
    return gather_slices(table, (0,), [to_index(index, table.shape[0])], 0)


def _add_rows(
    rows: Float[Array, "count size"],
    index: Int[Array, " count"],
    num_rows: int,
    scale_by_freq: bool,
) -> Float[Array, "{num_rows} size"]:
    """A table of zeros plus ``rows`` at ``index``, each divided by its count if asked.

    Rows are added in a wide dtype: a frequent word would stop growing in a 16-bit float.
    """
    wide = op_math(rows.dtype)
    rows = cast(rows, wide)
    if scale_by_freq:
        ones = jnp.ones(index.shape, np.int32)
        count = scatter_slices(jnp.zeros(num_rows, np.int32), (0,), [index], ones, 0, "add")
        rows = rows / cast(gather_slices(count, (0,), [index], 0), wide)[..., None]
    table = jnp.zeros((num_rows, rows.shape[-1]), wide)
    return scatter_slices(table, (0,), [index], rows, 0, "add")


@lowering("aten.embedding.default")
def embedding(
    weight: Shaped[Array, "rows size"],
    indices: Int[Array, "*shape"],
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Shaped[Array, "*shape size"]:
    return rows(weight, indices)


@lowering("aten.embedding_dense_backward.default")
def embedding_dense_backward(
    grad_output: Float[Array, "*shape size"],
    indices: Int[Array, "*shape"],
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Float[Array, "{num_weights} size"]:
    index = to_index(indices.reshape(-1), num_weights)
    if padding_idx >= 0:  # out of range: dropped
        index = jnp.where(index == padding_idx, np.array(num_weights, index.dtype), index)
    grad = grad_output.reshape(index.shape + grad_output.shape[indices.ndim :])
    grad = grad.reshape(index.shape[0], grad_output.shape[-1])
    return cast(_add_rows(grad, index, num_weights, scale_grad_by_freq), grad_output.dtype)


@lowering("aten.embedding_renorm.default", static=("norm_type",))
def embedding_renorm(x: Array, indices: Array, max_norm: Array | float, norm_type: float) -> Array:
    """Rows looked up are scaled down to ``max_norm`` (aten ``embedding_renorm_cpu_``)."""
    index = to_index(indices.reshape(-1), x.shape[0])
    picked = cast(rows(x, index), op_math(x.dtype))
    limit = cast(max_norm, picked.dtype)
    norm = jnp.linalg.norm(picked, ord=norm_type, axis=-1, keepdims=True)
    scale = jnp.where(norm > limit, limit / (norm + np.array(1e-7, norm.dtype)), 1)
    return scatter_slices(x, (0,), [index], cast(picked * scale, x.dtype), 0, "set")


def _bag_of(offsets: Int[Array, " _"], count: int, num_bags: int) -> Int32[Array, " {count}"]:
    """The bag of each of ``count`` indices: how many bags start at or before it, less one."""
    starts = to_index(offsets[:num_bags], count + 1)
    marks = scatter_slices(
        jnp.zeros(count, np.int32), (0,), [starts], jnp.ones(num_bags, np.int32), 0, "add"
    )
    return jnp.cumsum(marks, dtype=np.int32) - np.int32(1)


def _fit(x: Array, shape: tuple[int, ...]) -> Array:
    """``x`` in the length that the meta function asks for; entries beyond it are unused."""
    if x.shape[1:] != shape[1:]:
        return jnp.zeros(shape, x.dtype)
    x = x[: shape[0]]
    return jnp.pad(x, [(0, shape[0] - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


@lowering("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def embedding_bag(
    weight: Float[Array, "rows size"],
    indices: Int[Array, " count"],
    offsets: Int[Array, " _"],
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Float[Array, " count"] | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    *,
    out: Any,
) -> tuple[Float[Array, "bags size"], Int[Array, " _"], Int[Array, " _"], Int[Array, " ..."]]:
    """Result, bag of each index, number of indices of each bag, index of each maximum.

    ``padding_idx`` counts from the end if negative in Python; here it is -1 for none.
    """
    num_bags, width = out[0].shape
    count = indices.shape[0]
    bag = _bag_of(offsets, count, num_bags)
    used = jnp.ones(count, np.bool_) if padding_idx < 0 else indices != padding_idx
    target = jnp.where(used, bag, cast(num_bags, np.int32))  # out of range: dropped
    size = scatter_slices(
        jnp.zeros(num_bags, np.int32), (0,), [target], jnp.ones(count, np.int32), 0, "add"
    )
    picked = rows(weight, indices)
    if mode == _MAX:
        low = jnp.full((num_bags, width), -np.inf, weight.dtype)
        best = scatter_slices(low, (0,), [target], picked, 0, "amax")
        # The first index whose row holds the maximum, NaN included.
        top = rows(best, bag)
        is_best = used[:, None] & ((picked == top) | (jnp.isnan(picked) & jnp.isnan(top)))
        order = jnp.where(is_best, lax.iota(np.int32, count)[:, None], cast(count, np.int32))
        first = jnp.full((num_bags, width), count, np.int32)
        first = scatter_slices(first, (0,), [target], order, 0, "amin")
        winners = jnp.where(first < count, gather_slices(indices, (0,), [first], 0), 0)
        empty = (size == 0)[:, None]
        result = jnp.where(empty, np.array(0, weight.dtype), best)
    else:
        wide = op_math(weight.dtype)
        picked = cast(picked, wide)
        if per_sample_weights is not None:
            picked = picked * cast(per_sample_weights, wide)[:, None]
        added = target
        if include_last_offset and padding_idx < 0 and weight.dtype != np.float64:
            # The CPU's kernel for these counts indices after the last offset, and does not add
            # them.
            is_before = lax.iota(np.int32, count) < cast(offsets[num_bags], np.int32)
            added = jnp.where(is_before, target, cast(num_bags, np.int32))
        result = scatter_slices(jnp.zeros((num_bags, width), wide), (0,), [added], picked, 0, "add")
        if mode == _MEAN:
            result = result / cast(jnp.maximum(size, np.int32(1)), wide)[:, None]
        # As the CPU's: a sum of floats counts nothing.
        winners = size if mode == _MEAN else jnp.zeros(out[3].shape, np.int32)
        if mode == _SUM:
            size = jnp.zeros_like(size)
    return (
        result,
        _fit(bag, out[1].shape),
        _fit(size, out[2].shape),
        _fit(winners, out[3].shape),
    )


@lowering("aten._embedding_bag_dense_backward.default")
def embedding_bag_dense_backward(
    grad: Float[Array, "bags size"],
    indices: Int[Array, " count"],
    offset2bag: Int[Array, " count"],
    bag_size: Int[Array, " _"],
    maximum_indices: Int[Array, " ..."],
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Float[Array, " count"] | None,
    padding_idx: int = -1,
) -> Float[Array, "{num_weights} size"]:
    if mode == _MAX:
        filled = (bag_size[: grad.shape[0]] > 0)[:, None]
        index = to_index(jnp.where(filled, maximum_indices, num_weights), num_weights)
        column = lax.broadcasted_iota(np.int32, grad.shape, 1)
        wide = cast(grad, op_math(grad.dtype))
        table = jnp.zeros((num_weights, grad.shape[1]), wide.dtype)
        return cast(scatter_slices(table, (0, 1), [index, column], wide, 0, "add"), grad.dtype)
    picked = cast(rows(grad, offset2bag), op_math(grad.dtype))
    if mode == _MEAN:
        size = jnp.maximum(
            gather_slices(bag_size, (0,), [to_index(offset2bag, bag_size.size)], 0), 1
        )
        picked = picked / cast(size, picked.dtype)[:, None]
    if per_sample_weights is not None:
        picked = picked * cast(per_sample_weights, picked.dtype)[:, None]
    index = to_index(indices, num_weights)
    if padding_idx >= 0:
        index = jnp.where(index == padding_idx, np.array(num_weights, index.dtype), index)
    return cast(_add_rows(picked, index, num_weights, scale_grad_by_freq), grad.dtype)


@lowering("aten._embedding_bag_backward.default")
def embedding_bag_backward(
    grad: Float[Array, "bags size"],
    indices: Int[Array, " count"],
    offsets: Int[Array, " _"],
    offset2bag: Int[Array, " _"],
    bag_size: Int[Array, " _"],
    maximum_indices: Int[Array, " ..."],
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Float[Array, " count"] | None,
    padding_idx: int = -1,
) -> Float[Array, "{num_weights} size"]:
    if offset2bag.shape != indices.shape:  # the CPU's fast path leaves it empty
        offset2bag = _bag_of(offsets, indices.shape[0], grad.shape[0])
    return embedding_bag_dense_backward(
        grad,
        indices,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@lowering("aten._embedding_bag_per_sample_weights_backward.default")
def embedding_bag_per_sample_weights_backward(
    grad: Float[Array, "bags size"],
    weight: Float[Array, "rows size"],
    indices: Int[Array, " count"],
    offsets: Int[Array, " _"],
    offset2bag: Int[Array, " _"],
    mode: int,
    padding_idx: int = -1,
) -> Float[Array, " count"]:
    """The dot product of each looked-up row with its bag's gradient."""
    if offset2bag.shape != indices.shape:
        offset2bag = _bag_of(offsets, indices.shape[0], grad.shape[0])
    wide = op_math(grad.dtype)
    result = jnp.sum(cast(rows(grad, offset2bag), wide) * cast(rows(weight, indices), wide), axis=1)
    if padding_idx >= 0:
        result = jnp.where(indices == padding_idx, np.array(0, wide), result)
    return cast(result, grad.dtype)
