"""Rules of primitives that move elements: reshape, transpose, broadcast, pad, concatenate, iota."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from tpu_core.padding.interpret import PaddingContext, rule, shape_of
from tpu_core.padding.layout import Dim, Padded, is_static, merge, replaced
from tpu_core.padding.sizes import NotPaddableError, Size, static


@rule("broadcast_in_dim", handles=("shape",))
def broadcast_in_dim(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    x = operands[0]
    sizes = context.sizes([e.params["shape"] for e in eqns])
    dims: list[Dim] = [(s,) for s in sizes]
    before = [shape_of(e.invars[0]) for e in eqns]
    after = [e.params["shape"] for e in eqns]
    for axis, out in enumerate(eqns[0].params["broadcast_dimensions"]):
        if len({b[axis] == a[out] for b, a in zip(before, after)}) > 1:
            raise NotPaddableError("a dim that is broadcast in one recording and not in another")
        if x.dims[axis] != (static(1),):
            dims[out] = x.dims[axis]
    shape = tuple(context.space.length(d) for d in dims)
    array = lax.broadcast_in_dim(x.array, shape, eqns[0].params["broadcast_dimensions"])
    return [Padded(array, tuple(dims))]


@rule("squeeze")
def squeeze(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    x, gone = operands[0], eqns[0].params["dimensions"]
    dims = tuple(d for i, d in enumerate(x.dims) if i not in gone)
    return [Padded(lax.squeeze(x.array, gone), dims)]


@rule("transpose")
def transpose(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    x, order = operands[0], eqns[0].params["permutation"]
    return [Padded(lax.transpose(x.array, order), tuple(x.dims[i] for i in order))]


@rule("reshape", handles=("new_sizes",))
def reshape(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    if eqns[0].params["dimensions"] is not None:
        raise NotPaddableError("a reshape that permutes")
    x = operands[0]
    sizes = context.sizes([e.params["new_sizes"] for e in eqns])
    dims = _regroup([s for d in x.dims for s in d], sizes)
    if dims is None:
        parts = _divided(x.dims, sizes)
        dims = _regroup([s for d in parts for s in d], sizes)
        if dims is None:
            return [_reshape_by_index(context, x, sizes)]
        x = context.space.relayout(x, parts)
    shape = tuple(context.space.length(d) for d in dims)
    return [Padded(x.array.reshape(shape), dims)]


def _divided(dims: tuple[Dim, ...], sizes: tuple[Size, ...]) -> tuple[Dim, ...]:
    """The dims with a product of sizes, as rows of a batch of sequences, divided as new dims are:
    whole rows are moved then, not single elements.
    """
    found, start = list(dims), 0
    for axis, dim in enumerate(dims):
        product = dim[0]
        if len(dim) > 1 or product.is_static or product.offset:
            continue
        spans = itertools.combinations(range(start, len(sizes) + 1), 2)
        parts = ((end, sizes[begin:end]) for begin, end in spans)
        end, part = next(((e, p) for e, p in parts if merge(p) == product), (start, dim))
        found[axis], start = part, end
    return tuple(found)


def _regroup(factors: list[Size], sizes: tuple[Size, ...]) -> tuple[Dim, ...] | None:
    """The factors in order, split among the new dims; None where a padded one would be cut."""
    left = [s for s in factors if s != static(1)]
    dims: list[Dim] = []
    for size in sizes:
        taken: list[Size] = []
        while merge(tuple(taken)) != size:
            if not left or (size.is_static and not left[0].is_static):
                return None
            head = left[0]
            part = math.gcd(head.offset, _missing(size, taken, left)) if head.is_static else 0
            if not head.is_static or part == head.offset:
                taken.append(left.pop(0))
            elif part > 1:
                left[0] = static(head.offset // part)
                taken.append(static(part))
            else:
                return None
        dims.append(tuple(taken) or (static(1),))
    return tuple(dims) if not left else None


def _missing(size: Size, taken: list[Size], left: list[Size]) -> int:
    """The static multiple that a dim of ``size`` lacks, beside the varying factors to come."""
    have = [s for s in taken if not s.is_static]
    symbols = sum(len(s.symbols) for s in have)
    coming = []
    for s in left:
        if symbols >= len(size.symbols):
            break
        if not s.is_static:
            coming.append(s)
            symbols += len(s.symbols)
    scale = math.prod(_content(s) for s in (*taken, *coming))
    return _content(size) // scale if _content(size) % scale == 0 else 1


def _content(size: Size) -> int:
    """The largest integer that divides the size whatever its symbols are."""
    if size.is_static:
        return size.offset
    return math.gcd(size.scale, size.offset, 0 if size.total is None else _content(size.total))


def _reshape_by_index(context: PaddingContext, x: Padded, sizes: tuple[Size, ...]) -> Padded:
    """A reshape across padding: each element is fetched from where it lies."""
    space = context.space
    shape = tuple(space.padded(s) for s in sizes)
    index = jnp.zeros(shape, np.int32)
    for axis, size in enumerate(sizes):
        here = lax.broadcasted_iota(np.int32, shape, axis)
        index = index * jnp.asarray(space.actual(size), np.int32) + here
    factors = [s for d in x.dims for s in d]
    place, stride = jnp.zeros(shape, np.int32), 1
    for size in reversed(factors):
        actual = jnp.maximum(jnp.asarray(space.actual(size), np.int32), 1)
        place += (index % actual) * stride
        index //= actual
        stride *= space.padded(size)
    return context.prefix(jnp.take(x.array.reshape(-1), place, mode="clip"), sizes)


@rule("iota", handles=("shape",))
def iota(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    sizes = context.sizes([e.params["shape"] for e in eqns])
    shape = tuple(context.space.padded(s) for s in sizes)
    params = eqns[0].params
    return [
        context.prefix(lax.broadcasted_iota(params["dtype"], shape, params["dimension"]), sizes)
    ]


@rule("rev")
def rev(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    x = operands[0]
    for axis in eqns[0].params["dimensions"]:
        x = context.space.as_prefix(x, axis)
        index = jnp.arange(x.array.shape[axis], dtype=np.int32)
        last = jnp.asarray(context.space.count(x.dims[axis]), np.int32) - 1
        x = Padded(jnp.take(x.array, last - index, axis=axis, mode="clip"), x.dims)
    return [x]


@rule("concatenate")
def concatenate(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    axis = eqns[0].params["dimension"]
    sizes = context.out(eqns)
    if all(is_static(x.dims[axis]) for x in operands):
        aligned = _same_but(context, operands, axis)
        array = lax.concatenate([x.array for x in aligned], axis)
        dims = aligned[0].dims
        return [Padded(array, replaced(dims, axis, (sizes[axis],)))]
    aligned = _same_but(context, [context.space.as_prefix(x, axis) for x in operands], axis)
    # Each operand is written over the padding of those before it.
    dims = replaced(aligned[0].dims, axis, (sizes[axis],))
    shape = [context.space.length(d) for d in dims]
    room = sum(x.array.shape[axis] for x in aligned)
    wide = [*shape[:axis], max(room, shape[axis]), *shape[axis + 1 :]]
    array = jnp.zeros(wide, aligned[0].array.dtype)
    start: Any = np.int32(0)
    for x in aligned:
        starts = [np.int32(0)] * len(wide)
        starts[axis] = start
        array = lax.dynamic_update_slice(array, x.array, starts)
        start = start + jnp.asarray(context.space.count(x.dims[axis]), np.int32)
    return [Padded(lax.slice_in_dim(array, 0, shape[axis], axis=axis), dims)]


@rule("stack")
def stack(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    axis = eqns[0].params["axis"]
    one = (static(1),)
    rows = [
        Padded(jnp.expand_dims(x.array, axis), (*x.dims[:axis], one, *x.dims[axis:]))
        for x in operands
    ]
    aligned = _same_but(context, rows, axis)
    array = lax.concatenate([x.array for x in aligned], axis)
    return [Padded(array, replaced(aligned[0].dims, axis, (static(len(aligned)),)))]


def _same_but(context: PaddingContext, xs: list[Padded], axis: int) -> list[Padded]:
    """Operands brought to the same layout in all dims but one."""
    others = [Padded(x.array, (*x.dims[:axis], *x.dims[axis + 1 :])) for x in xs]
    dims = []
    for i in range(len(others[0].dims)):
        choices = [x.dims[i] for x in others]
        dims.append(max(choices, key=lambda d: (len(d), not is_static(d))))
    return [context.space.relayout(x, (*dims[:axis], x.dims[axis], *dims[axis:])) for x in xs]


@rule("pad", handles=("padding_config",))
def pad(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    x, value = operands
    sizes = context.out(eqns)
    config = []
    dims = list(x.dims)
    for axis, amounts in enumerate(zip(*(e.params["padding_config"] for e in eqns))):
        low, interior = amounts[0][0], amounts[0][2]
        if any(a[2] != interior for a in amounts):
            raise NotPaddableError("padding between elements that depends on a size")
        if any(a[0] != low for a in amounts):
            if interior:
                raise NotPaddableError("padding between elements, and in front by a size")
            at_end = all(a[1] == 0 for a in amounts)
            lows = [a[0] for a in amounts]
            x = _pad_by_size(context, x, value, axis, lows, sizes[axis] if at_end else None)
            low = 0
        if all(a == (0, 0, 0) for a in amounts):
            config.append((0, 0, 0))
            continue
        x = context.space.as_prefix(x, axis)
        if not is_static(x.dims[axis]):
            x = Padded(context.space.mask(x, [axis], value.array), x.dims)
        dims[axis] = (sizes[axis],)
        length = x.array.shape[axis]
        length += max(length - 1, 0) * interior
        config.append((low, context.space.padded(sizes[axis]) - low - length, interior))
    return [Padded(lax.pad(x.array, value.array, config), tuple(dims))]


def _pad_by_size(
    context: PaddingContext,
    x: Padded,
    value: Padded,
    axis: int,
    lows: Sequence[int],
    whole: Size | None,
) -> Padded:
    """Padding in front whose length follows sizes; a negative length removes elements there.

    Args:
        context, x, value, axis: As of `pad`.
        lows: The length in each recording.
        whole: The size of the result, where nothing follows the elements: the length is the rest.
    """
    space = context.space
    x = space.as_prefix(x, axis)
    low: jax.Array | int
    if whole is not None:
        low, room = space.actual(whole) - space.count(x.dims[axis]), space.padded(whole)
    else:
        size = context.size(lows)
        low, room = space.actual(size), space.padded(size)
    array = space.mask(x, [axis], value.array)
    length = array.shape[axis]
    shape = list(array.shape)
    # Room in front for the elements that a negative length removes.
    shape[axis] += length + max(room, 0)
    starts: list[Any] = [np.int32(0)] * len(shape)
    starts[axis] = jnp.asarray(low, np.int32) + np.int32(length)
    array = lax.dynamic_update_slice(jnp.full(shape, value.array), array, starts)
    array = lax.slice_in_dim(array, length, shape[axis], axis=axis)
    # What follows it is the padding value, so that its length does not matter.
    return Padded(array, replaced(x.dims, axis, (static(array.shape[axis]),)))
