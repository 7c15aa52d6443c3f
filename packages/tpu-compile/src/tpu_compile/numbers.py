"""Numbers that a program computes: a count that a loop carries, say, unlike a tensor's size."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tpu_compile.fx_utils import lowering_of
from tpu_compile.sizes import SYMBOLIC, is_known

_ARITHMETIC = {
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
    operator.neg,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.eq,
    operator.ne,
    torch.sym_not,
}

ITEM = torch.ops.aten._local_scalar_dense.default
"""What ``tensor.item()`` is in a graph."""

_aten = torch.ops.aten

INDEXED = {_aten.select.int: 2, _aten.select_backward.default: 3}
"""Ops that take such a number as their index, and its place among their arguments."""

WINDOWS = {
    _aten.slice.Tensor: 1,
    _aten.slice_scatter.default: 2,
    _aten.slice_backward.default: 2,
}
"""Ops that take such numbers as the bounds of a window whose length is known, and the place of its
dim among their arguments; start, end and step come next."""

# A tensor's place takes a number too, which stands for one of no dims.
_NUMBERS = (torch.NumberType, torch.FloatType, torch.TensorType)


def symbols(value: Any) -> set[Any]:
    """The symbols in a number, or in a tensor's shape."""
    if isinstance(value, SYMBOLIC):
        return set(value.node.expr.free_symbols)
    if isinstance(value, torch.Tensor):
        return set().union(*map(symbols, (*value.shape, *value.stride())))
    return set()


def symbols_inside(module: GraphModule, known: AbstractSet[Any]) -> set[Any]:
    """The symbols that the body of a loop or branch knows, given those known outside."""
    own = (n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder")
    return set(known).union(*(symbols(v) for v in own if isinstance(v, torch.Tensor)))


def is_computed(value: Any, known: AbstractSet[Any]) -> bool:
    """Return whether a node's metadata is a number that the program computes."""
    number = isinstance(value, (torch.SymInt, torch.SymBool))
    return number and not is_known(value.node.expr, known)


def are_known(value: Any, known: AbstractSet[Any]) -> bool:
    """Return whether a number, or a tensor's shape and strides, follow from what is known."""
    if isinstance(value, torch.Tensor):
        return all(are_known(n, known) for n in (*value.shape, *value.stride()))
    return not isinstance(value, SYMBOLIC) or is_known(value.node.expr, known)


def is_from_zero(node: Node) -> bool:
    """Return whether a node is an integer from 0 on, in the trace and so by the graph's guards."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) and value.node.has_hint() and value.node.hint >= 0


def can_be_computed(node: Node) -> bool:
    """Return whether a node that is such a number can be one in a program, and where it is used."""
    made = node.op == "placeholder" or node.target in (*_ARITHMETIC, operator.getitem, ITEM)
    if node.target in (operator.floordiv, operator.mod):
        made = isinstance(node.args[1], int) and node.args[1] != 0  # XLA divides by 0 in silence
    return made and all(takes(user, node) for user in node.users)


def window(op: Any, args: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Dim, start, end and step among the arguments of one of `WINDOWS`."""
    given = list(args[WINDOWS[op] :])
    dim, start, end, step = given + [0, None, None, 1][len(given) :]
    return dim, start, end, step


def takes(user: Node, number: Node) -> bool:
    """Return whether a node takes a number that its program has no value of as it is traced."""
    if user.op == "output" or user.target in _ARITHMETIC:
        return True
    op = user.target
    if isinstance(op, torch._ops.HigherOrderOperator):
        return True
    if op in INDEXED:
        return user.args[INDEXED[op]] is number
    if op in WINDOWS:
        dim, start, end, step = window(op, user.args)
        # A start from the end of an array, or one that may be, would depend on the array's size.
        is_window = isinstance(start, Node) and not user.kwargs and step == 1
        is_counted = is_window and is_from_zero(start) and is_from_zero(number)
        return is_counted and any(x is number for x in (start, end)) and number is not dim
    entry = lowering_of(op)
    if entry is None or not isinstance(op, torch._ops.OpOverload):
        return False
    named = [*zip(op._schema.arguments, user.args)]
    named += [(a, user.kwargs[a.name]) for a in op._schema.arguments if a.name in user.kwargs]
    places = [a for a, value in named if value is number]
    # Anywhere else, in a list of sizes say, it would have to be known.
    return bool(places) and all(
        isinstance(a.type, _NUMBERS) and a.name not in entry.static for a in places
    )
