"""Targets of a graph's nodes: their lowerings, and the graphs that it is passed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Target

from tpu_core.extend import Lowering, find_lowering


def lowering_of(op: Target) -> Lowering | None:
    """The registry's entry for an overload of a graph; a view's is that of its copying form.

    Example:
        >>> lowering_of(torch.ops.aten.t.default).op
        'aten.t_copy.default'
    """
    found = find_lowering(op)
    if found is not None or not isinstance(op, torch._ops.OpOverload) or not op.is_view:
        return found
    namespace, packet, overload = str(op).split(".")
    return find_lowering(f"{namespace}.{packet}_copy.{overload}")


def subgraph(node: object) -> GraphModule | None:
    """The graph that a ``get_attr`` node stands for; None where it is a constant."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    owner = node.graph.owning_module
    assert owner is not None
    found = getattr(owner, str(node.target))
    return found if isinstance(found, GraphModule) else None


def subgraphs(node: Node) -> list[GraphModule]:
    """The graphs among a node's arguments."""
    found = (subgraph(n) for n in node.all_input_nodes)
    return [module for module in found if module is not None]


def outputs(module: GraphModule) -> list[Any]:
    """Outputs of a graph: nodes, numbers and None."""
    (output,) = [n for n in module.graph.nodes if n.op == "output"]
    result = output.args[0]
    return list(result) if isinstance(result, (tuple, list)) else [result]


def line_of(node: Node) -> str | None:
    """The user's line that a node comes from, ``model.py:31 in forward``, or None."""
    lines = _LINE.findall(str(node.meta.get("stack_trace") or ""))
    if not lines:
        return None
    file, number, function = lines[-1]
    return f"{file}:{number} in {function}"


def line_label(node: Node) -> str:
    """Line, op and name of a node, as profiles and HLO text show it:
    ``model.py:31/aten.mm#mm_2``.
    """
    line = (line_of(node) or "").split(" in ")[0].rsplit("/", 1)[-1]
    op = str(node.target).removesuffix(".default")
    return f"{line}/{op}#{node.name}" if line else f"{op}#{node.name}"


_LINE = re.compile(r'File "(.*)", line (\d+), in (.*)')


def part_of(
    module: GraphModule, nodes: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node]
) -> GraphModule:
    """Some nodes of a graph as a graph, which is given others."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[r] for r in results))
    return GraphModule(module, graph)


def is_tensor(node: Node) -> bool:
    """Return whether the value of a node is a tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def has_random_op(node: Node) -> bool:
    """Return whether PyTorch says of a node's op that it draws random numbers."""
    op = node.target
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in op.tags
