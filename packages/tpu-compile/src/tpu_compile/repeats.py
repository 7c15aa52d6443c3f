"""Calls of a graph that have the form of an earlier one.

Layers repeat: what a lowering makes of sizes is the same in all of them, so that one need be looked
at where only the form of a graph's ops is asked for (`tpu_core.padding.segment_signature`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from tpu_compile.fx_utils import lowering_of
from tpu_compile.sizes import Symbols


def repeats(module: GraphModule, symbols: Symbols) -> dict[Node, Node]:
    """Each call that repeats an earlier one in all but its tensors' contents, with that one.

    Args:
        module: The graph.
        symbols: Its open sizes.
    """

    def form(value: Any) -> str:
        if isinstance(value, Node):
            return value.name if value.op == "get_attr" else form(value.meta.get("val"))
        if isinstance(value, (list, tuple)):
            return f"[{','.join(map(form, value))}]"
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{form(tuple(value.shape))}{form(tuple(value.stride()))}"
        return symbols.text(value)

    first: dict[tuple[str, ...], Node] = {}
    same: dict[Node, Node] = {}
    for node in module.graph.nodes:
        entry = lowering_of(node.target) if node.op == "call_function" else None
        if entry is None or entry.draws(node.args, node.kwargs):
            continue
        named = (f"{k}={form(v)}" for k, v in node.kwargs.items())
        written = (entry.op, *map(form, node.args), *named, form(node.meta.get("val")))
        earlier = first.setdefault(written, node)
        if earlier is not node:
            same[node] = earlier
    return same
