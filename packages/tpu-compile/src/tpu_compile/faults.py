"""Faults of graphs: the nodes that no program can hold, each with its reason."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten

from tpu_compile import control_flow, numbers, random_states, reports
from tpu_compile.evaluate import is_arithmetic
from tpu_compile.fx_utils import has_random_op, lowering_of, outputs, subgraphs
from tpu_compile.refusals import is_refused
from tpu_compile.sizes import SYMBOLIC, Symbols


@dataclass(frozen=True, slots=True)
class Fault:
    """A node that no program can hold.

    Attributes:
        node: The node.
        why: The reason.
    """

    node: Node
    why: str


MAKES_SIZE = "its result's size depends on values"
NO_LOWERING = "it has no lowering"
REFUSED = "PyTorch refuses these arguments"
ON_CPU = "its tensors are on the CPU"
OUT_OF_ORDER = "it reads memory that is not in order"
NUMBER = "it computes a number that others need as they are traced"


def faults(module: GraphModule, known: AbstractSet[Any] | None = None) -> Iterator[Fault]:
    """The nodes for which a graph is no single program.

    Args:
        module: A graph of functional overloads.
        known: The symbols that are known outside, for the body of a loop or branch.
    """
    is_body = known is not None
    known = known_symbols(module) if known is None else known
    fixed = constants(module, known)
    for node in module.graph.nodes:
        if random_states.is_state(node):
            continue
        why = _fault(node, known, is_body, node in fixed)
        if why is not None:
            yield Fault(node, why)
    for r in () if is_body else outputs(module):
        if (
            isinstance(r, Node)
            and isinstance(r.meta.get("val"), torch.Tensor)
            and not random_states.is_state(r)
        ):
            if r.meta["val"].device.type != "tpu":
                yield Fault(r, ON_CPU)


def constants(module: GraphModule, known: AbstractSet[Any]) -> dict[Node, None]:
    """The nodes that follow from sizes that are known and from nothing else, in order."""
    found: dict[Node, None] = {}
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, SYMBOLIC):
            is_constant = numbers.are_known(value, known)
        else:
            is_call = node.op == "call_function" and not has_random_op(node)
            is_constant = node.op == "get_attr" or is_call
            is_constant = is_constant and all(n in found for n in node.all_input_nodes)
        if is_constant:
            found[node] = None
    return found


def _fault(node: Node, known: AbstractSet[Any], is_body: bool, is_constant: bool) -> str | None:
    value = node.meta.get("val")
    for v in tree_flatten(value)[0]:
        if isinstance(v, torch.Tensor):
            if v.device.type != "tpu" and not is_constant and (v.dim() or has_random_op(node)):
                return ON_CPU
            if not numbers.are_known(v, known):
                return MAKES_SIZE
    if node.op == "placeholder" and isinstance(value, torch.Tensor):
        # A number on the CPU that the graph makes itself is one of the program's values.
        if value.device.type != "tpu" and not is_body:
            return ON_CPU
    if numbers.is_computed(value, known):
        return None if numbers.can_be_computed(node) else NUMBER
    if node.op != "call_function" or (is_arithmetic(value) and numbers.are_known(value, known)):
        return None
    return _reason(node, known)


def _reason(node: Node, known: AbstractSet[Any]) -> str | None:
    """The reason for which no program can call what a node calls, or None."""
    op: Any = random_states.drawn_op(node) or node.target
    if isinstance(op, torch._ops.HigherOrderOperator):
        if not control_flow.can_be_lowered(node):
            return NO_LOWERING
        bodies = ((g, numbers.symbols_inside(g, known)) for g in subgraphs(node))
        inner = next((f for b in bodies for f in faults(*b)), None)
        return f"{reports.name_of(inner.node)} inside of it: {inner.why}" if inner else None
    if isinstance(op, torch._ops.OpOverload):
        if op is torch.ops.aten.as_strided.default and not _is_plain(node.args[0]):
            return OUT_OF_ORDER
        if lowering_of(op) is None:
            return NO_LOWERING
        return REFUSED if op is node.target and is_refused(node) else None
    is_plain = op is operator.getitem or is_arithmetic(node.meta.get("val"))
    return None if is_plain else NO_LOWERING


def _is_plain(node: Any) -> bool:
    """Return whether a tensor's elements lie in memory in order: what `as_strided` goes by."""
    value = node.meta["val"]
    return bool(value.is_contiguous() and value.storage_offset() == 0)


def known_symbols(module: GraphModule) -> AbstractSet[Any]:
    """The symbols that a graph's inputs give a value to."""
    values = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
    return Symbols(values, [v for v in values if isinstance(v, torch.Tensor)]).known
