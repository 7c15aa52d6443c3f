"""Keep what activation checkpointing recomputes apart from the first time.

AOTAutograd copies the ops of ``torch.utils.checkpoint`` into the backward graph. Where forward and
backward end in one program, XLA would see that equal ops are computed twice and keep the first
result: the memory that was to be saved. All that a checkpoint's copies read goes through one
optimization barrier, together with the gradients that its backward waits for, as in
`tpu_core.compiler.recomputation` for eager.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax import lax
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

_RECOMPUTED = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)


@dataclass(frozen=True, slots=True)
class Region:
    """The ops of one checkpoint.

    Attributes:
        nodes: Its ops, in the graph's order.
        reads: Values that they read and that were computed before the first of them.
        gradients: Values that were computed before it and are read by ops that depend on them.
    """

    nodes: list[Node]
    reads: list[Node]
    gradients: list[Node]


def find(module: GraphModule) -> list[Region]:
    """The checkpoints that a backward graph recomputes; a forward graph has none."""
    nodes = list(module.graph.nodes)
    if not any(n.op == "placeholder" and n.name.startswith("tangents") for n in nodes):
        return []
    members: dict[Any, list[Node]] = {}
    for node in nodes:
        if node.op == "call_function" and node.meta.get("recompute") in _RECOMPUTED:
            members.setdefault(node.meta.get("ac_graph_id"), []).append(node)
    return [_region(nodes, found) for found in members.values()]


def _region(nodes: list[Node], members: list[Node]) -> Region:
    begin = nodes.index(members[0])
    before = {n for n in nodes[:begin] if n.op != "get_attr"}
    inside = set(members)
    reads = dict.fromkeys(n for m in members for n in m.all_input_nodes if n in before)
    behind = set(members)
    gradients: dict[Node, None] = {}
    for node in nodes[begin:]:
        if node.op == "output" or behind.isdisjoint(node.all_input_nodes):
            continue
        behind.add(node)
        if node not in inside:
            gradients.update(dict.fromkeys(n for n in node.all_input_nodes if n in before))
    return Region(members, [n for n in reads if n not in gradients], list(gradients))


class Barriers:
    """Puts the barriers while a graph is evaluated in order.

    Args:
        module: The graph.
    """

    def __init__(self, module: GraphModule) -> None:
        self._regions = {n: region for region in find(module) for n in region.nodes}
        self._inside: dict[Node, dict[Node, Any]] = {}

    def values(self, node: Node, values: dict[Node, Any]) -> Mapping[Node, Any]:
        """The values that a node is to read.

        Args:
            node: The node about to be evaluated.
            values: The value of each node so far; gradients are put behind the barrier in it.
        """
        region = self._regions.get(node)
        if region is None:
            return values
        first = region.nodes[0]
        if node is first:
            self._inside[first] = {}
            wanted = [n for n in (*region.reads, *region.gradients) if _is_array(values[n])]
            if wanted:
                behind = dict(zip(wanted, lax.optimization_barrier([values[n] for n in wanted])))
                self._inside[first] = {n: behind[n] for n in region.reads if n in behind}
                values.update((n, behind[n]) for n in region.gradients if n in behind)
        return ChainMap(self._inside[first], values)


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype")
