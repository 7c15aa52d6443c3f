"""Numbers that a program computes: a count that a loop carries, say, unlike a tensor's size."""

from __future__ import annotations

import operator
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten

from tpu_compile.fx_utils import lowering_of, subgraphs
from tpu_compile.sizes import SYMBOLIC, is_known

_ARITHMETIC = {
    operator.add,
    operator.sub,
    operator.mul,
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

SELECT = torch.ops.aten.select.int
"""Takes such a number as its index."""

# A tensor's place takes a number too, which stands for one of no dims.
_NUMBERS = (torch.NumberType, torch.FloatType, torch.TensorType)


def symbols(value: Any) -> set[Any]:
    """The symbols in a number, or in a tensor's shape."""
    if isinstance(value, SYMBOLIC):
        return set(value.node.expr.free_symbols)
    if isinstance(value, torch.Tensor):
        return set().union(*map(symbols, (*value.shape, *value.stride())))
    return set()


def expressions(module: GraphModule, without: Collection[Node] = ()) -> set[Any]:
    """The numbers of a graph's nodes and of the shapes and strides of their tensors, those of its
    subgraphs among them.

    Args:
        module: The graph.
        without: Nodes that are left out.
    """
    found: set[Any] = set()
    for node in module.graph.nodes:
        if node not in without:
            for value in tree_flatten(node.meta.get("val"))[0]:
                is_tensor = isinstance(value, torch.Tensor)
                own = (*value.shape, *value.stride()) if is_tensor else (value,)
                found.update(n.node.expr for n in own if isinstance(n, SYMBOLIC))
            found.update(*map(expressions, subgraphs(node)))
    return found


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


def can_be_computed(node: Node) -> bool:
    """Return whether a node that is such a number can be one in a program, and where it is used."""
    made = node.op == "placeholder" or node.target in (*_ARITHMETIC, operator.getitem, ITEM)
    return made and all(_takes(user, node) for user in node.users)


def _takes(user: Node, number: Node) -> bool:
    if user.op == "output" or user.target in _ARITHMETIC:
        return True
    op = user.target
    if isinstance(op, torch._ops.HigherOrderOperator):
        return True
    if op is SELECT:
        return user.args[2] is number
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
