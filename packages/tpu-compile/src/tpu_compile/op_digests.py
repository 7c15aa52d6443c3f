"""Identity of what a graph's ops compute, where their names and arguments do not say it all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tpu_compile.fx_utils import lowering_of, subgraphs
from tpu_compile.sizes import SYMBOLIC, Sizes
from tpu_core.extend import GraphEvaluator


def op_digests(module: GraphModule, sizes: Sizes) -> Iterator[str]:
    """The identity of each op that has one, else the digest of its package where that is another.

    Args:
        module: The graph.
        sizes: Values of its symbols.
    """

    def size(number: Any) -> Any:
        # A loop's body has sizes of its own; any will do to tell two functions apart.
        return sizes.value(number) if sizes.knows(number) else number.node.hint or 1

    def described(node: Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, (bool, int, float, *SYMBOLIC)):
            return size(value)
        return (
            GraphEvaluator.avals(value, size)
            if isinstance(value, (torch.Tensor, list, tuple))
            else value
        )

    for node in module.graph.nodes:
        entry = lowering_of(node.target) if node.op == "call_function" else None
        if entry is not None and entry.identity is not None:
            args, kwargs = (map_arg(a, described) for a in (node.args, node.kwargs))
            yield entry.key_part(*args, **kwargs)
        elif entry is not None and (source := entry.key_part()):
            yield source
        for body in subgraphs(node):
            yield from op_digests(body, sizes)
