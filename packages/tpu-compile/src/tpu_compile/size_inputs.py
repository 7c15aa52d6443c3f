"""Integers that a graph is given: sizes, numbers that it computes with, and those it does not need.

Each value of a size is a bucket or a program. An integer that no shape follows from, such as a
position or a divisor, is a number of the call instead, as those of eager's ops are, and so is what
the host computes of such integers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten

from tpu_compile import numbers
from tpu_compile.fx_utils import subgraphs
from tpu_compile.sizes import SYMBOLIC, Symbols, is_known


def split_inputs(
    module: GraphModule, inputs: Sequence[Node], given: Sequence[torch.Tensor]
) -> tuple[list[int], list[Node], list[Node]]:
    """Positions of the inputs that are sizes, the numbers that a call passes to the program, and
    those that the host alone computes.

    A number is an input, or what the host computes of inputs, as Python would: ``1 / n``. An
    integer that no node uses is neither where all shapes follow from the others: a backward graph
    takes sizes of its forward that its tensors do not have, such as ``n`` where they have
    ``n + m``. What a graph returns of its integers the host knows.

    Args:
        module: The graph.
        inputs: Its placeholders.
        given: Its tensor inputs, as fake tensors.
    """
    values: list[Any] = [n.meta.get("val") for n in inputs]
    integers = [i for i, v in enumerate(values) if isinstance(v, (int, torch.SymInt))]

    def known(positions: Iterable[int]) -> AbstractSet[Any]:
        return Symbols([values[i] for i in positions], given).known

    all_known = known(integers)
    found = [i for i in integers if isinstance(values[i], torch.SymInt)]
    while found:
        rest = known(i for i in integers if i not in found)
        fixed = _needed(module, all_known, rest)
        stay = [i for i in found if not is_known(values[i].node.expr, rest)]
        stay = [i for i in stay if not numbers.symbols(values[i]) & fixed]
        if stay == found:
            break
        found = stay
    sizes = [i for i in integers if i not in found]
    used = [i for i in sizes if _is_used(inputs[i])]
    if len(used) < len(sizes):
        unused = {inputs[i] for i in sizes if i not in used}
        unused.update(n for n in inputs if _is_made(n) and _are_numbers(n, all_known))
        has, needs = known(sizes), known(used)
        if all(is_known(e, needs) for e in _expressions(module, unused) if is_known(e, has)):
            sizes = used
    left = known(sizes)
    passed: list[Node] = []
    others: list[Node] = []
    for node in module.graph.nodes:
        if _is_for_call(node, all_known, left):
            users = [u for u in node.users if u.op != "output"]
            is_passed = any(not _is_on_host(u, all_known) for u in users)
            (passed if is_passed else others).append(node)
    return sizes, passed, others


def _is_on_host(node: Node, known: AbstractSet[Any]) -> bool:
    """Return whether the host computes a node: Python's arithmetic on numbers that it knows."""
    return (
        node.op == "call_function"
        and not isinstance(node.target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
        and all(map(_is_number, [node, *node.all_input_nodes]))
        and numbers.are_known(node.meta["val"], known)
    )


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, *SYMBOLIC))


def _is_used(node: Node) -> bool:
    return any(user.op != "output" for user in node.users)


def _needed(module: GraphModule, all_known: AbstractSet[Any], known: AbstractSet[Any]) -> set[Any]:
    """Symbols of which a node needs a value as it is traced.

    Args:
        module: The graph.
        all_known: Expressions that all inputs give.
        known: Those that are left.
    """
    found: set[Any] = set()
    for node in module.graph.nodes:
        for value in tree_flatten(node.meta.get("val"))[0]:
            if numbers.are_known(value, known) or not numbers.are_known(value, all_known):
                continue  # the latter is computed already
            if not _is_for_call(node, all_known, known) or not _are_numbers(node, all_known):
                found |= numbers.symbols(value)
        for inner in subgraphs(node):
            found |= _needed(inner, all_known, known)
    return found


def _is_for_call(node: Node, all_known: AbstractSet[Any], known: AbstractSet[Any]) -> bool:
    """Return whether a node is a number that the host knows, and the program if it is passed."""
    value = node.meta.get("val")
    if _is_made(node) and _are_numbers(node, all_known):
        return True
    if not isinstance(value, SYMBOLIC):
        return False
    if numbers.are_known(value, known):
        # Of sizes too: which number two of them make is no expression that programs have.
        is_ratio = isinstance(value, torch.SymFloat) and _is_on_host(node, all_known)
        return is_ratio and _are_numbers(node, all_known)
    is_given = node.op == "placeholder" and numbers.are_known(value, all_known)
    return is_given or _is_on_host(node, all_known)


def _is_made(node: Node) -> bool:
    """Return whether an input is what forward made of its integers, such as ``n > 6``."""
    value = node.meta.get("val")
    return node.op == "placeholder" and isinstance(value, (torch.SymBool, torch.SymFloat))


def _are_numbers(node: Node, known: AbstractSet[Any]) -> bool:
    """Return whether each use of a number takes one that only the call has."""

    def takes(user: Node) -> bool:
        if user.op == "output" or _is_on_host(user, known):
            return True
        if isinstance(user.target, torch._ops.HigherOrderOperator):
            return False  # A loop or branch may have it as a size, by a name of its own.
        # An index from the end would be counted from that of a padded array.
        may_be_negative = user.target not in numbers.INDEXED and not _is_number(user)
        return (may_be_negative or numbers.is_from_zero(node)) and numbers.takes(user, node)

    return all(map(takes, node.users))


def _expressions(module: GraphModule, without: Collection[Node] = ()) -> set[Any]:
    """The numbers of a graph's nodes and of the shapes and strides of their tensors, those of its
    subgraphs among them.
    """
    found: set[Any] = set()
    for node in module.graph.nodes:
        if node not in without:
            for value in tree_flatten(node.meta.get("val"))[0]:
                is_tensor = isinstance(value, torch.Tensor)
                own = (*value.shape, *value.stride()) if is_tensor else (value,)
                found.update(n.node.expr for n in own if isinstance(n, SYMBOLIC))
            found.update(*map(_expressions, subgraphs(node)))
    return found
