"""Results of a graph that are new values of its inputs and reuse their memory."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from tpu_compile.fx_utils import outputs
from tpu_compile.graph_op import GRAPHS

_UPDATES = "tpu_updates"  # in a node's metadata: position of the input


def mark_updates(module: GraphModule, written: list[int]) -> None:
    """Note which outputs are written to an input once the graph has run.

    Args:
        module: A graph of AOTAutograd's, which returns new values of inputs first.
        written: Positions of these inputs.
    """
    for index, output in zip(written, outputs(module)):
        if isinstance(output, Node) and output.op != "placeholder":
            output.meta.setdefault(_UPDATES, index)


def updates(key: str) -> dict[int, int]:
    """For results of the program of a graph, by its key, the tensor input that each is to be."""
    if (graph := GRAPHS.get(key)) is None:  # let go of by a reset, which lowering it will say
        return {}
    made = [result for result, is_made in zip(graph.results, graph.made) if is_made]
    marked = {i: r.meta[_UPDATES] for i, r in enumerate(made) if _UPDATES in r.meta}
    return {i: graph.tensors.index(at) for i, at in marked.items() if at in graph.tensors}
