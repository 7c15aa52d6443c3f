"""Lines of the ops inside a recorded graph, from the packages that record graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Gives the user's line of a node of a graph, by the plan of the recorded op and the node's name.
LineOfNode = Callable[[Any, str], str | None]

_sources: dict[str, LineOfNode] = {}


def register_graph_lines(op: str, line_of: LineOfNode) -> None:
    """Name the lines of the nodes of graphs that are recorded as one op.

    Args:
        op: The op, ``"tpu_compile.graph.default"``.
        line_of: Gives the line of a node, ``"model.py:31 in forward"``.
    """
    _sources[op] = line_of


def line_of_node(plan: Any, node: str) -> str | None:
    """The user's line of a node of a recorded graph, or None where it is not known."""
    source = _sources.get(plan.op)
    return source(plan, node) if source is not None else None
