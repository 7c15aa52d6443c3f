"""Ops that stand for whole graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tpu_core.compiler.aliases import tells_updates
from tpu_core.padding.synthetic import DynamicGraph, register_dynamic_graph
from tpu_core.profiler.graph_lines import register_graph_lines
from tpu_core.recorder.checked import stands_for


def register_graph_op(
    op: str,
    graph_of: Callable[[str], DynamicGraph],
    updates: Callable[[str], Mapping[int, int]] | None = None,
    line_of: Callable[[str, str], str | None] | None = None,
) -> None:
    """Declare an op that stands for graphs: their open sizes, ops, and updates of inputs.

    Open sizes let one program serve all sizes of a bucket; the names of the ops tell which checks
    of values (`TPU_CHECKS`) the program needs; an update takes its input's memory.

    Args:
        op: The overload, which takes ``(Tensor[] inputs, int[] sizes, ..., str key)`` and returns
            ``Tensor[]``: ``"tpu_compile.graph.default"``. Its lowering is registered with
            `register`. ``int[] inner_sizes`` are those of tensors inside of it that are no sum or
            product of its operands' sizes.
        graph_of: The graph of a ``key``.
        updates: For a ``key``, positions of results that are new values of inputs, with the
            positions of these inputs.
        line_of: The user's line of a node, ``"model.py:31 in forward"``, by ``key`` and the node's
            name: profiles show it.

    Example:
        >>> register_graph_op("mylib.graph.default", GRAPHS.__getitem__)
    """
    register_dynamic_graph(op, graph_of)
    stands_for(op, lambda plan: graph_of(plan.argument("key")).ops)
    if line_of is not None:
        register_graph_lines(op, lambda plan, node: line_of(plan.argument("key"), node))
    if updates is not None:
        tells_updates(op, updates)
