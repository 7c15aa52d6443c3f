"""Rules of slices, gathers and scatters: indices stay inside what counts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from tpu_core.padding.interpret import PaddingContext, bind, rule, shape_of
from tpu_core.padding.layout import Dim, Padded, is_static, replaced
from tpu_core.padding.sizes import NotPaddableError, Size, static

_ONE = static(1)


@rule("slice", handles=("start_indices", "limit_indices", "strides"))
def slice_(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    x = operands[0]
    sizes = context.out(eqns)
    starts = context.sizes([e.params["start_indices"] for e in eqns])
    rank = len(sizes)
    # The last row of each sequence, of rows of all of them: a step is a length.
    strides = context.sizes([e.params["strides"] or (1,) * rank for e in eqns])
    before = [shape_of(e.invars[0]) for e in eqns]
    after = [shape_of(e.outvars[0]) for e in eqns]
    for axis in range(rank):
        if all(b[axis] == a[axis] for b, a in zip(before, after)):
            continue  # all of it
        x = _window(context, x, axis, starts[axis], sizes[axis], strides[axis])
    return [x]


def _window(
    context: PaddingContext, x: Padded, axis: int, start: Size, size: Size, stride: Size
) -> Padded:
    """Part of a dim, from a start and by a stride that may follow sizes."""
    space = context.space
    x = space.as_prefix(x, axis)
    length = space.padded(size)
    dims = replaced(x.dims, axis, (size,))
    if start.is_static and stride == _ONE and start.offset + length <= x.array.shape[axis]:
        end = start.offset + length
        return Padded(lax.slice_in_dim(x.array, start.offset, end, axis=axis), dims)
    first, step = (jnp.asarray(space.actual(s), np.int32) for s in (start, stride))
    index = first + step * jnp.arange(length, dtype=np.int32)
    return Padded(jnp.take(x.array, index, axis=axis, mode="clip"), dims)


@rule("split", handles=("sizes",))
def split(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    x, axis = operands[0], eqns[0].params["axis"]
    lengths = [e.params["sizes"] for e in eqns]
    starts = [context.size([sum(s[:i]) for s in lengths]) for i in range(len(lengths[0]))]
    sizes = context.sizes(lengths)
    return [_window(context, x, axis, start, size, _ONE) for start, size in zip(starts, sizes)]


@rule("dynamic_slice", handles=("slice_sizes",))
def dynamic_slice(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    x, *starts = operands
    sizes = context.sizes([e.params["slice_sizes"] for e in eqns])
    first = [s.array for s in starts]
    shapes = [shape_of(e.invars[0]) for e in eqns]
    lengths: list[int] = []
    dims: list[Dim] = []
    for axis, size in enumerate(sizes):
        if all(e.params["slice_sizes"][axis] == s[axis] for e, s in zip(eqns, shapes)):
            lengths.append(x.array.shape[axis])
            dims.append(x.dims[axis])
            first[axis] = jnp.zeros_like(first[axis])
            continue
        x = context.space.as_prefix(x, axis)
        first[axis] = _clamped(context, x, axis, size, first[axis])
        lengths.append(context.space.padded(size))
        dims.append((size,))
        if not size.is_static:  # else the window, padded, could be moved back by the array's end
            x = Padded(
                context.space.resized(
                    x.array,
                    [n + lengths[axis] * (i == axis) for i, n in enumerate(x.array.shape)],
                ),
                x.dims,
            )
    return [Padded(lax.dynamic_slice(x.array, first, lengths), tuple(dims))]


def _clamped(context: PaddingContext, x: Padded, axis: int, size: Size, start: Any) -> Any:
    """A start such that the window ends within what counts, as XLA clamps it."""
    last = jnp.asarray(context.space.count(x.dims[axis])) - context.space.actual(size)
    return jnp.clip(start, 0, jnp.asarray(last, start.dtype))


@rule("dynamic_update_slice")
def dynamic_update_slice(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    x, update, *starts = operands
    first = [s.array for s in starts]
    shapes = [(shape_of(e.invars[0]), shape_of(e.invars[1])) for e in eqns]
    value = update
    varying: list[int] = []
    for axis in range(len(x.dims)):
        if all(a[axis] == b[axis] for a, b in shapes):
            dim = max(x.dims[axis], value.dims[axis], key=len)
            x = context.space.relayout(x, replaced(x.dims, axis, dim))
            value = context.space.relayout(value, replaced(value.dims, axis, dim))
            first[axis] = jnp.zeros_like(first[axis])
            continue
        x, value = context.space.as_prefix(x, axis), context.space.as_prefix(value, axis)
        (size,) = value.dims[axis]
        first[axis] = _clamped(context, x, axis, size, first[axis])
        if not size.is_static:
            varying.append(axis)
    if not varying:
        return [Padded(lax.dynamic_update_slice(x.array, value.array, first), x.dims)]
    return [Padded(_written(context, x, value, first, varying), x.dims)]


def _written(
    context: PaddingContext, x: Padded, value: Padded, starts: list[Any], varying: list[int]
) -> jax.Array:
    """The array with a window overwritten whose lengths vary: padding writes what was there."""
    shape, lengths = x.array.shape, value.array.shape
    # Room behind, or the window, padded, would be moved back by the array's end.
    array = context.space.resized(
        x.array, [n + lengths[axis] * (axis in varying) for axis, n in enumerate(shape)]
    )
    valid = functools.reduce(
        lax.bitwise_and,
        [
            lax.broadcast_in_dim(context.space.valid(value.dims[axis]), lengths, (axis,))
            for axis in varying
        ],
    )
    before = lax.dynamic_slice(array, starts, lengths)
    array = lax.dynamic_update_slice(array, lax.select(valid, value.array, before), starts)
    return lax.slice(array, [0] * len(shape), shape)


@rule("gather", handles=("slice_sizes",))
def gather(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    x, indices = operands
    params = eqns[0].params
    numbers = params["dimension_numbers"]
    modes = lax.GatherScatterMode
    for axis in range(len(x.dims)):
        if axis not in numbers.operand_batching_dims:
            x = _indexed(context, eqns, x, axis)
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims)
    for i, j in pairs:
        dim = max(x.dims[i], indices.dims[j], key=len)
        x = context.space.relayout(x, replaced(x.dims, i, dim))
        indices = context.space.relayout(indices, replaced(indices.dims, j, dim))
    start = indices.array
    window: list[int] = []
    windows: list[Dim] = []
    for axis, sizes in enumerate(zip(*(e.params["slice_sizes"] for e in eqns))):
        whole_dim = all(n == shape_of(e.invars[0])[axis] for n, e in zip(sizes, eqns))
        if whole_dim and not (sizes[0] == 1 and is_static(x.dims[axis])):
            window.append(x.array.shape[axis])
            windows.append(x.dims[axis])
            continue
        size = context.size(sizes)
        if not size.is_static:
            raise NotPaddableError("a gather of windows that vary")
        window.append(size.offset)
        windows.append((size,))
        if axis in numbers.start_index_map and not is_static(x.dims[axis]):
            if params["mode"] == modes.FILL_OR_DROP:
                raise NotPaddableError("a gather that fills beyond a dim that varies")
            k = numbers.start_index_map.index(axis)
            last = jnp.asarray(context.space.count(x.dims[axis])) - size.offset
            kept = jnp.clip(start[..., k], 0, jnp.asarray(last, start.dtype))
            start = start.at[..., k].set(kept)
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    offsets = [d for axis, d in enumerate(windows) if axis not in dropped]
    batches = list(indices.dims[:-1])
    dims: list[Dim] = []
    for axis in range(len(offsets) + len(batches)):
        dims.append(offsets.pop(0) if axis in numbers.offset_dims else batches.pop(0))
    (array,) = bind(eqns[0], [x.array, start], slice_sizes=tuple(window))
    return [Padded(array, tuple(dims))]


def _indexed(context: PaddingContext, eqns: list[JaxprEqn], x: Padded, axis: int) -> Padded:
    """The operand with the padding of a dim that is indexed, not taken whole, at its end."""
    whole_dim = all(e.params["slice_sizes"][axis] == shape_of(e.invars[0])[axis] for e in eqns)
    return x if whole_dim else context.space.as_prefix(x, axis)


@rule("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter-min")
@rule("scatter_min", "scatter-max", "scatter_max")
def scatter(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    x, indices, updates = operands
    params = eqns[0].params
    numbers = params["dimension_numbers"]
    for i, j in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims):
        dim = max(x.dims[i], indices.dims[j], key=len)
        x = context.space.relayout(x, replaced(x.dims, i, dim))
        indices = context.space.relayout(indices, replaced(indices.dims, j, dim))
    for axis in numbers.inserted_window_dims:
        x = context.space.as_prefix(x, axis)
    scatter_dims = [i for i in range(len(updates.dims)) if i not in numbers.update_window_dims]
    for j, i in enumerate(scatter_dims):
        dim = max(indices.dims[j], updates.dims[i], key=len)
        indices = context.space.relayout(indices, replaced(indices.dims, j, dim))
        updates = context.space.relayout(updates, replaced(updates.dims, i, dim))
    taken = [a for a in range(len(x.dims)) if a not in numbers.inserted_window_dims]
    taken = [a for a in taken if a not in numbers.operand_batching_dims]
    for axis, i in zip(taken, numbers.update_window_dims):
        covers = all(shape_of(e.invars[0])[axis] == shape_of(e.invars[2])[i] for e in eqns)
        if covers:
            dim = max(x.dims[axis], updates.dims[i], key=len)
            x = context.space.relayout(x, replaced(x.dims, axis, dim))
            updates = context.space.relayout(updates, replaced(updates.dims, i, dim))
        elif not (is_static(x.dims[axis]) and is_static(updates.dims[i])):
            raise NotPaddableError("a scatter of windows that vary")
    start = indices.array
    mode = params["mode"]
    modes = lax.GatherScatterMode
    for k, axis in enumerate(numbers.scatter_dims_to_operand_dims):
        if is_static(x.dims[axis]) and mode != modes.CLIP:
            continue
        window = 1 if axis in numbers.inserted_window_dims else None
        if window is None:
            raise NotPaddableError("a scatter of windows that vary")
        last = jnp.asarray(context.space.count(x.dims[axis]) - 1, start.dtype)
        column = start[..., k]
        if mode == modes.CLIP:
            column = jnp.clip(column, 0, last)
        else:  # beyond what counts is beyond the array
            column = jnp.where(column > last, jnp.iinfo(start.dtype).max, column)
        start = start.at[..., k].set(column)
    if not all(is_static(d) for d in indices.dims[:-1]):
        # What padding would write goes nowhere.
        valid = jnp.ones((), bool)
        for j, dim in enumerate(indices.dims[:-1]):
            if not is_static(dim):
                shape = [1] * start.ndim
                shape[j] = -1
                valid = valid & context.space.valid(dim).reshape(shape)
        start = jnp.where(valid, start, jnp.iinfo(start.dtype).max)
        # Of two equal indices "unique" may have promised the padding none.
        changed = {"mode": modes.FILL_OR_DROP, "unique_indices": False, "indices_are_sorted": False}
    else:
        changed = {"mode": modes.FILL_OR_DROP if mode == modes.CLIP else mode}
    (array,) = bind(eqns[0], [x.array, start, updates.array], **changed)
    return [Padded(array, x.dims)]
