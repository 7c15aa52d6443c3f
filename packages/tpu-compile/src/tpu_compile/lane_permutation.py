"""Lane permutations by shifts of whole rows, without slices.

Rotary embeddings swap the halves of a row, ``cat((-x[..., n:], x[..., :n]), -1)``, or neighbours,
and their gradient puts slices back between zeros. XLA writes each half of a TPU's row of 128 to
memory, padded to a whole row. A shifted row, of which some lanes are taken, is read where it lies,
in the loop that uses it: docs/adr/0017-rotary-embeddings-by-shifted-rows.md has the figures.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.fx import GraphModule, Node

from tpu_core.extend import find_lowering, register

logger = logging.getLogger("tpu_compile")

_NAME = "tpu_compile.moved_lanes.default"
# Each distance reads the whole row: that pays for a few, and for rows of heads, not of layers.
_MOST_SHIFTS, _WIDEST = 3, 512
# Ops that are followed from where lanes are put together to the rows that they come from.
_DEPTH = 8

_aten = torch.ops.aten
_SLICES = (_aten.slice.Tensor, _aten.slice_copy.Tensor)
_SELECTS = (_aten.select.int, _aten.select_copy.int)
_VIEWS = (_aten.view.default, _aten.view_copy.default, _aten._unsafe_view.default)
_SPLITS = (
    *(_aten.split.Tensor, _aten.split_copy.Tensor),
    *(_aten.split_with_sizes.default, _aten.split_with_sizes_copy.default),
)
_libraries: list[torch.library.Library] = []  # an op ends with its library

Lanes = tuple[int, ...]
"""For each lane of a row where it comes from: lane n as n + 1, negated as -(n + 1), zero as 0."""
Moved = tuple[Node, Lanes]


def move_lanes(module: GraphModule) -> None:
    """Have rows that are put together of slices of other rows taken of shifted ones.

    Args:
        module: Of functional ops with metadata, for a TPU; it is changed.
    """
    found = 0
    for node in reversed(list(module.graph.nodes)):
        if node.op != "call_function" or not node.users or _width(node) is None:
            continue
        match = _put_together(node, node.meta["val"].shape, _DEPTH)
        if match is not None and _pays(node, *match):
            _replace(node, *match)
            found += 1
    if found:
        module.graph.eliminate_dead_code()
        module.recompile()
        logger.info("%d tensors are made of shifted rows", found)


def _pays(node: Node, rows: Node, lanes: Lanes) -> bool:
    alike = node.meta["val"].dtype == rows.meta["val"].dtype
    shifts = _shifts(lanes)
    return alike and 0 < len(shifts) <= _MOST_SHIFTS and shifts != {0}


def _shifts(lanes: Lanes) -> set[int]:
    """The distances that lanes move by."""
    return {place - (abs(lane) - 1) for place, lane in enumerate(lanes) if lane}


# --- where lanes come from


def _lanes_of(node: Node, shape: Any, depth: int) -> Moved | None:
    """Source of a node's lanes, in the first tensor of a shape that leads to it."""
    if node.meta["val"].shape == shape:
        return node, tuple(range(1, shape[-1] + 1))
    if not depth:
        return None
    return _put_together(node, shape, depth) or _taken(node, shape, depth)


def _put_together(node: Node, shape: Any, depth: int) -> Moved | None:
    """Source of the lanes of a node that concatenates or pads rows."""
    if node.target is _aten.cat.default:
        parts, dim = _arguments(node, 0)
        return _joined(parts, shape, depth, interleaved=False) if _is_of_last(node, dim) else None
    if node.target in _VIEWS:
        stack: Any = node.args[0]
        if stack.target is not _aten.stack.default or not _merges_last(stack, node):
            return None
        parts, dim = _arguments(stack, 0)
        return _joined(parts, shape, depth, interleaved=True) if _is_of_last(stack, dim) else None
    if node.target is not _aten.slice_backward.default:
        return None
    grad, _, dim, start, end, step = _arguments(node)
    width = _width(node)
    if width is None or not _is_of_last(node, dim) or not _are_known(start, end, step):
        return None
    if (found := _lanes_of(grad, shape, depth - 1)) is None:
        return None
    lanes = [0] * width
    lanes[start:end:step] = found[1]
    return found[0], tuple(lanes)


def _joined(parts: Sequence[Node], shape: Any, depth: int, interleaved: bool) -> Moved | None:
    found = [_lanes_of(part, shape, depth - 1) for part in parts]
    known = [f for f in found if f is not None]
    if len(known) < len(found) or len({rows for rows, _ in known}) != 1:
        return None
    each = [lanes for _, lanes in known]
    ordered = zip(*each, strict=True) if interleaved else each
    return known[0][0], tuple(lane for lanes in ordered for lane in lanes)


def _taken(node: Any, shape: Any, depth: int) -> Moved | None:
    """Source of the lanes of a node that selects or negates another's."""
    if node.target is _aten.neg.default:
        found = _lanes_of(node.args[0], shape, depth - 1)
        return found and (found[0], tuple(-lane for lane in found[1]))
    if node.target in _SLICES:
        source, dim, start, end, step = _arguments(node, 0, None, None, 1)
        if not _is_of_last(node, dim) or not _are_known(start, end, step):
            return None
        places = slice(start, end, step)
    elif node.target in _SELECTS:
        # Of the last dimension, that a view made of a part of the one before.
        view, dim, place = node.args
        if view.target not in _VIEWS or not _is_of_last(view, dim) or not _are_known(place):
            return None
        source = view.args[0]
        if not _merges_last(view, source):
            return None
        count = view.meta["val"].shape[-1]
        places = slice(place % count, None, count)
    elif node.target is operator.getitem and node.args[0].target in _SPLITS:
        split, place = node.args
        source, _, dim = _arguments(split, None, 0)
        lengths = [part.shape[-1] for part in split.meta["val"]]
        if not _is_of_last(node, dim) or not _are_known(*lengths):
            return None
        begin = sum(lengths[:place])
        places = slice(begin, begin + lengths[place])
    else:
        return None
    found = _lanes_of(source, shape, depth - 1)
    return found and (found[0], found[1][places])


def _arguments(node: Node, *defaults: Any) -> tuple[Any, ...]:
    """Those of a call, with the defaults of all but the first where they are not given."""
    given: tuple[Any, ...] = tuple(node.args)
    return (*given, *defaults[len(given) - 1 :])


def _width(node: Node) -> int | None:
    """Of the rows of a node's result, where whole rows can be shifted."""
    value = node.meta.get("val")
    width = value.shape[-1] if isinstance(value, torch.Tensor) and value.dim() else 0
    return width if isinstance(width, int) and 0 < width <= _WIDEST else None


def _is_of_last(node: Node, dim: Any) -> bool:
    """Return whether a dimension of a node's result is the last."""
    rank = node.meta["val"].dim()
    return bool(rank) and dim % rank == rank - 1


def _are_known(*places: Any) -> bool:
    return all(n is None or isinstance(n, int) for n in places)


def _merges_last(deep: Node, flat: Node) -> bool:
    """Return whether the last dimension of ``flat`` is the last two of ``deep``."""
    parts, whole = deep.meta["val"].shape, flat.meta["val"].shape
    static = len(parts) >= 2 and _are_known(*parts[-2:])
    return static and (*parts[:-2], parts[-2] * parts[-1]) == tuple(whole)


# --- shifted rows


def _replace(node: Node, rows: Node, lanes: Lanes) -> None:
    _define()
    with node.graph.inserting_before(node):
        made = _moved(rows, lanes)
    made.meta = {**node.meta}
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def _moved(rows: Node, lanes: Lanes) -> Node:
    """The rows with their lanes moved.

    What XLA would have to write to memory before it is shifted is computed of shifted rows instead.
    """
    if rows.target is _aten._to_copy.default and not rows.kwargs.keys() - {"dtype"}:
        source: Any = rows.args[0]
        return _like(rows, (_moved(source, lanes),))
    if rows.target is _aten.mul.Tensor and _can_be_factored(rows, lanes):
        return _moved_product(rows, lanes)
    made = rows.graph.call_function(torch.ops.tpu_compile.moved_lanes.default, (rows, list(lanes)))
    made.meta = {**rows.meta, "val": rows.meta["val"].new_empty(rows.meta["val"].shape)}
    return made


def _is_wide(factor: Any) -> bool:
    value = factor.meta["val"] if isinstance(factor, Node) else None
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[-1] != 1


def _can_be_factored(rows: Node, lanes: Lanes) -> bool:
    """Return whether zeros in place of the factors' rows are zeros of the product: 0 times inf is
    none.
    """
    return not rows.kwargs and (all(lanes) or all(map(_is_wide, rows.args)))


def _moved_product(rows: Node, lanes: Lanes) -> Node:
    """A product of moved factors, one of them with the signs."""
    factors: list[Any] = []
    for factor in _arguments(rows):
        if _is_wide(factor):
            factor, lanes = _moved(factor, lanes), tuple(map(abs, lanes))
        factors.append(factor)
    return _like(rows, tuple(factors))


def _like(node: Node, args: tuple[Any, ...]) -> Node:
    op = cast(torch._ops.OpOverload, node.target)
    made = node.graph.call_function(op, args, dict(node.kwargs))
    made.meta = dict(node.meta)
    return made


@functools.cache
def _define() -> None:
    library = torch.library.Library("tpu_compile", "FRAGMENT")
    library.define("moved_lanes(Tensor x, int[] lanes) -> Tensor")
    library.impl("moved_lanes", lambda x, lanes: x.new_empty(x.shape), "Meta")
    _libraries.append(library)
    if find_lowering(_NAME) is None:
        register(_NAME, _lower)


def _lower(x: jax.Array, lanes: Sequence[int]) -> jax.Array:
    """By a row shifted by each distance, of which its lanes are taken."""
    sources = np.array(lanes)
    shifts = np.where(sources == 0, 0, np.arange(len(lanes)) - (abs(sources) - 1))
    made = jnp.zeros_like(x)
    for shift in map(int, np.unique(shifts[sources != 0])):
        row = lax.pad(x, np.array(0, x.dtype), [*((0, 0, 0),) * (x.ndim - 1), (shift, -shift, 0)])
        for sign, part in ((1, row), (-1, -row)):
            inside = (shifts == shift) & (np.sign(sources) == sign)
            if inside.any():
                made = jnp.where(inside, part, made)
    return made
