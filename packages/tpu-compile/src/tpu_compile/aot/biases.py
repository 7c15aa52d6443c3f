"""Add the bias of a linear layer where the layer's result is read, not before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

_ADDMM = torch.ops.aten.addmm.default
_VIEWS = (
    *(torch.ops.aten.view.default, torch.ops.aten.view_copy.default),
    torch.ops.aten._unsafe_view.default,
)


def add_late(graph: GraphModule) -> None:
    """Have biases added to views of products, where ``addmm`` adds them to the products.

    PyTorch makes one product of all dims of a linear layer's input but the last, and adds the bias
    to that. XLA then keeps the product's layout for what follows: heads of attention, say, are
    copied into theirs. A sum behind the view is one with the slices and transposes that read it,
    and nothing is copied. Products and sums are in the dtype in which ``addmm`` has them, float32
    for 16-bit floats, and rounded once.

    Args:
        graph: Of functional ops with metadata; it is changed.
    """
    for node in list(graph.graph.nodes):
        plain = node.target is _ADDMM and len(node.args) == 3 and not node.kwargs
        if plain and all(_keeps_last(node, view) for view in node.users):
            for view in list(node.users):
                _add_behind(graph, node, view)


def _keeps_last(product: Node, view: Node) -> bool:
    """Return whether a node is a view of a product that leaves its last dim as it is."""
    bias: Any = product.args[0]
    wide = product.meta["val"].shape[-1]
    return (
        view.target in _VIEWS
        and tuple(bias.meta["val"].shape) == (wide,)
        and view.meta["val"].dim() > 2
        and view.meta["val"].shape[-1] == wide
    )


def _add_behind(graph: GraphModule, product: Node, view: Node) -> None:
    bias, left, right = product.args
    value = view.meta["val"]
    dtype = value.dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    def call(target: Any, args: Sequence[Any], shape: Sequence[int], to: torch.dtype) -> Node:
        made = graph.graph.call_function(target, tuple(args))
        made.meta = {**product.meta, "val": value.new_empty(shape, dtype=to)}
        return made

    aten = torch.ops.aten
    with graph.graph.inserting_before(view):
        flat = product.meta["val"].shape
        if wide is dtype:
            result = call(aten.mm.default, (left, right), flat, dtype)
        else:
            result = call(aten.mm.dtype, (left, right, wide), flat, wide)
        result = call(view.target, (result, view.args[1]), value.shape, wide)
        result = call(aten.add.Tensor, (result, bias), value.shape, wide)
        if wide is not dtype:
            result = call(aten._to_copy.default, (result,), value.shape, dtype)
            result.kwargs = {"dtype": dtype}
    view.replace_all_uses_with(result)
    graph.graph.erase_node(view)
