"""Values that programs must compute once, for all that read them.

XLA may compute a cheap value twice, once in each fusion that reads it, and round it otherwise: LLVM
makes one product and sum an FMA and leaves another. Where a program compares such a value with
itself, no element of ``x`` is equal to ``x.amax()``, and the gradient of a maximum is lost;
``sqrt(x.amax() - x)`` is NaN; ``x[:, None] - x`` has no zeros. So the operands of ops whose
results are among their numbers (maxima, medians, sorts), and of ops that meet a value in two views,
are read from behind one optimization barrier.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import torch
from jax import lax
from torch.fx import Graph, Node

_ALWAYS = frozenset(
    "amax amin aminmax max min median nanmedian sort msort topk kthvalue mode argmax argmin "
    "argsort searchsorted bucketize".split()
)
# Their lowerings compare, whatever else reads the operand.
_PLACES = frozenset(
    "cummax cummin adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d "
    "fractional_max_pool3d".split()
)
_NORMS = frozenset(
    "linalg_vector_norm norm dist _foreach_norm _cdist_forward _pdist_forward".split()
)
_REDUCTIONS = frozenset({"scatter_reduce", "index_reduce"})


def selects(op: str, arguments: Iterable[Any]) -> bool:
    """Return whether results of a call are among the numbers of its operands.

    Args:
        op: Name of the overload, in place or not.
        arguments: Those of the call; read for the order of a norm and the name of a reduction.

    Example:
        >>> selects("aten.linalg_vector_norm.default", (x, math.inf))
        True
    """
    name = _name_of(op)
    if name in _ALWAYS or name in _PLACES:
        return True
    if name in _NORMS:
        return any(isinstance(a, float) and math.isinf(a) for a in arguments)
    return name in _REDUCTIONS and any(a in ("amax", "amin") for a in arguments if type(a) is str)


def finds_places(op: str) -> bool:
    """Return whether a lowering compares its operand with its results."""
    return _name_of(op) in _PLACES


def _name_of(op: str) -> str:
    return op.partition(".")[2].partition(".")[0].rstrip("_")


def shared(operand: jax.Array) -> jax.Array:
    """``operand``, computed once for all that read the result."""
    fixed: jax.Array = lax.optimization_barrier(operand)
    return fixed


def compared(graph: Graph) -> set[Node]:
    """The nodes of a graph whose values are to be `shared`.

    Args:
        graph: Of functional overloads; a view's value is that of what it shows.
    """
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        bases = [_base(n) for n in node.all_input_nodes]
        if selects(str(node.target), node.args):
            alone = finds_places(str(node.target))
            found.update(n for n in bases if alone or len(set(_readers(n))) > 1)
        elif _is_overload(node.target) and torch.Tag.pointwise in node.target.tags:
            found.update(n for n in bases if bases.count(n) > 1)
    return {n for n in found if n.op == "call_function"}


def _base(node: Node) -> Node:
    """The node whose memory a view shows, or the node itself."""
    while node.op == "call_function" and node.all_input_nodes:
        (source, *_) = node.all_input_nodes
        target: Any = (source if node.target is operator.getitem else node).target
        if not (_is_overload(target) and target.is_view):
            break
        node = source
    return node


def _readers(node: Node) -> Iterator[Node]:
    """The nodes that read what a node makes, itself or in a view."""
    for user in node.users:
        if user.op == "call_function" and _base(user) is not user:
            yield from _readers(user)
        else:
            yield user


def _is_overload(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload)
