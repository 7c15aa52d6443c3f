"""Input mutations at the end of graphs, as AOTAutograd leaves them where ``x.data = y`` is.

The program computes what is written; the writes are ops of eager behind it, recorded in the same
trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from tpu_compile.aliasing import Boxed
from tpu_compile.fx_utils import is_tensor

# What `x.data = y` is since torch 2.15; before it was `set_`.
_ASSIGN = getattr(torch.ops.aten, "shallow_copy_data_", None)
_SETS = (torch.ops.aten.set_.source_Tensor, *(() if _ASSIGN is None else (_ASSIGN.default,)))
_COPY = torch.ops.aten.copy_.default


def replaces_storages(module: GraphModule) -> bool:
    """Return whether a graph of Dynamo's gives a tensor another storage: ``set_``, or ``x.data =
    y``.
    """
    return any(
        node.target in (torch.Tensor.set_, _ASSIGN)
        or (node.op == "call_method" and node.target == "set_")
        for node in module.graph.nodes
    )


@dataclass(frozen=True, slots=True)
class _Write:
    """A write of a result to an input.

    Attributes:
        target: Index of the input.
        result: Index of the result.
        sets: Whether the input takes the result's storage; else it keeps its own.
        source: Index of the input whose storage that is, and how much farther in it the result
            begins; None where the result has memory of its own.
    """

    target: int
    result: int
    sets: bool
    source: tuple[int, int] | None

    def run(self, inputs: dict[int, torch.Tensor], made: list[torch.Tensor]) -> None:
        target, value = inputs[self.target], made[self.result]
        if not self.sets:
            target.copy_(value)
            return
        if self.source is not None:
            base = inputs[self.source[0]]
            offset = base.storage_offset() + self.source[1]
            value = torch.as_strided(base, value.shape, value.stride(), offset)
        # An assignment to `data` is unseen by autograd.
        with torch.autograd._unsafe_preserve_version_counter(target):
            torch.ops.aten.set_.source_Tensor(target, value)


def compile_writing(module: GraphModule, compile: Callable[[GraphModule], Boxed]) -> Boxed:
    """Compile a graph that may end with writes to its inputs.

    Args:
        module: A graph that is functional but for such writes; it is left as it is.
        compile: Compiles a functional graph, with the results that are to be written as its last.
    """
    functional, writes, count = _apart(module)
    if not writes:
        return compile(module)
    compiled = compile(functional)
    kept = {w.target for w in writes} | {w.source[0] for w in writes if w.source}

    def run(arguments: list[Any]) -> list[Any]:
        inputs = {i: arguments[i] for i in kept}
        made = list(compiled(arguments))
        with torch._C._AutoDispatchBelowAutograd():
            for write in writes:
                write.run(inputs, made)
        return made[:count]

    vars(run)["_boxed_call"] = True
    return run


def _apart(module: GraphModule) -> tuple[GraphModule, list[_Write], int]:
    """The graph without its writes, the writes, and the number of its own results."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    wanted = graph.graph_copy(module.graph, copies)
    results = list(wanted) if isinstance(wanted, (tuple, list)) else [wanted]
    count = len(results)
    inputs = graph.find_nodes(op="placeholder")
    storages = {_storage(n): i for i, n in reversed(list(enumerate(inputs))) if is_tensor(n)}
    writes: list[_Write] = []
    for node in list(graph.nodes):
        if node.target not in (*_SETS, _COPY) or node.args[0] not in inputs:
            continue
        target, value = node.args[0], node.args[1]
        source = storages.get(_storage(value))
        place = None
        if source is not None:
            begins = (n.meta["val"].storage_offset() for n in (value, inputs[source]))
            place = (source, int(next(begins)) - int(next(begins)))
        writes.append(_Write(inputs.index(target), len(results), node.target in _SETS, place))
        results.append(value)
        node.replace_all_uses_with(target)
        results = [target if r is node else r for r in results]
        graph.erase_node(node)
    graph.output(tuple(results))
    return GraphModule(module, graph), writes, count


def _storage(node: Node) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)
