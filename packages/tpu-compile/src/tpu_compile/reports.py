"""Reports of compiled graphs: logs, structured traces, files.

``TORCH_LOGS="tpu_graphs"`` prints them, ``TORCH_TRACE`` records them for tlparse, and ``TPU_DUMP``
writes them.
"""

from __future__ import annotations

import itertools
import logging

import torch
from torch.fx import GraphModule, Node

from tpu_compile.fx_utils import line_of
from tpu_core.extend import Artifacts, user_line

_artifacts = Artifacts("tpu_graphs", "Graphs that torch.compile hands to device tpu.")
logger = _artifacts.logger
_numbers = itertools.count()


def graph(module: GraphModule, kind: str) -> None:
    """Show a graph that is about to be compiled.

    Args:
        module: The graph.
        kind: ``"inference"``, ``"forward"`` or ``"backward"``.
    """

    def text() -> str:
        return str(module.print_readable(print_output=False, include_stride=True))

    compile_id = torch._guards.CompileContext.current_compile_id()
    _artifacts.write(f"graph_{next(_numbers)}_{_file_name(compile_id)}{kind}.py", text)
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("[%s] %s graph\n%s", compile_id, kind, text())
    _artifacts.trace(f"tpu_{kind}_graph", text)


def split(node: Node, why: str, *, warns: bool = True) -> None:
    """Count an op that runs outside of the graph's programs, and warn at the first of an op.

    Args:
        node: Calls the op.
        why: The reason.
        warns: False where the user has asked for it.
    """
    line = line_of(node) or user_line() or None
    _artifacts.count_split(name_of(node), why, line, warns=warns)


def name_of(node: Node) -> str:
    """Name of the op that a node calls, alone or inside of a higher-order op."""
    ops = [a for a in node.args if isinstance(a, torch._ops.OpOverload)]
    return str(ops[0] if ops else node.target)


def _file_name(compile_id: object) -> str:
    """``0/1`` as ``frame0.1_``; nothing outside of a compile, as for compiled autograd."""
    return f"frame{str(compile_id).replace('/', '.')}_" if compile_id is not None else ""
