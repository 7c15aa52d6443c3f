"""Ops with effects: assertions, prints. AOTAutograd chains them by tokens, to keep their order.

A check that a program makes needs none: it stands by itself in the graph. What remains in the chain
is called by eager, in its order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from tpu_compile.fx_utils import lowering_of

_WITH_EFFECTS = torch.ops.higher_order.with_effects
_MAKE = torch.ops.prims._make_token.default
_SINK = torch.ops.prims._sink_tokens.default


def unwrap_checks(module: GraphModule) -> None:
    """Put ops that have a lowering in the place of the higher-order op around them."""
    graph = module.graph
    wrapped = [n for n in graph.nodes if n.target is _WITH_EFFECTS and lowering_of(n.args[1])]
    if not wrapped:
        return
    for node in wrapped:
        token, op, *args = node.args
        _, *values = node.meta["val"]
        with graph.inserting_before(node):
            new = graph.call_function(op, tuple(args), node.kwargs)
        several = len(op._schema.returns) > 1
        new.meta = {**node.meta, "val": tuple(values) if several else values[0]}
        for user in list(node.users):
            index: Any = user.args[1]
            if index and several:
                user.args = (new, index - 1)
                continue
            user.replace_all_uses_with(new if index else token)
            graph.erase_node(user)
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.target is _SINK and all(n.target is _MAKE for n in node.all_input_nodes):
            graph.erase_node(node)
        elif node.target is _MAKE and not node.users:
            graph.erase_node(node)
    module.recompile()
