"""Keep the leading dimensions of products apart where their results are divided.

PyTorch makes one dimension of a linear layer's batch and sequence, and two of them behind the
product. No part of a sequence is a range of that dimension: XLA would add a divided product up
everywhere, and take its part of the sum behind the view, where it can scatter the sum.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import register_flop_formula

from tpu_compile.aot import sharding_ops
from tpu_core.extend import contract, find_lowering, register, to_numpy_dtype

_NAME = "tpu_compile.mm_of_rows.default"
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.mm.dtype)
_VIEWS = (
    *(torch.ops.aten.view.default, torch.ops.aten.view_copy.default),
    torch.ops.aten._unsafe_view.default,
)
_libraries: list[torch.library.Library] = []  # an op ends with its library


def keep_rows(graph: GraphModule) -> None:
    """Have products take and give the dimensions that views have before and behind them.

    Args:
        graph: Of functional ops with metadata; it is changed, if a tensor of it is divided as
            `tpu_compile.aot.sharding_ops` says and XLA may choose the rest.
    """
    if not any(map(sharding_ops.is_open, graph.graph.nodes)):
        return
    _define()
    for node in list(graph.graph.nodes):
        if node.target not in _PRODUCTS:
            continue
        before = node.args[0]
        if not isinstance(before, Node) or before.target not in _VIEWS:
            continue
        source = before.all_input_nodes[0]
        rows = source.meta["val"].shape
        if rows[-1] != before.meta["val"].shape[-1] or len(rows) < 3:
            continue
        wide = (*rows[:-1], node.meta["val"].shape[-1])
        behind = [u for u in node.users if u.target in _VIEWS and u.meta["val"].shape == wide]
        if not behind or len(behind) < len(node.users):
            continue
        dtype = _narrowed(behind)
        with graph.graph.inserting_before(node):
            made = graph.graph.call_function(
                torch.ops.tpu_compile.mm_of_rows.default, (source, node.args[1], dtype)
            )
        made.meta = {**node.meta, "val": behind[0].meta["val"].to(dtype)}
        for view in behind:
            view.replace_all_uses_with(made)
            graph.graph.erase_node(view)
        graph.graph.erase_node(node)


def _narrowed(behind: list[Node]) -> torch.dtype:
    """The dtype of a product with these views.

    Where a bias is added in float32 and the rounded sum is divided, the product may be one of parts
    that XLA adds up: they travel in the dtype of the result, as in PyTorch.
    """
    aten, dtype = torch.ops.aten, behind[0].meta["val"].dtype
    adds = list(behind[0].users)
    if len(behind) > 1 or [n.target for n in adds] != [aten.add.Tensor]:
        return dtype
    copies = list(adds[0].users)
    if [n.target for n in copies] != [aten._to_copy.default]:
        return dtype
    if not any(map(sharding_ops.is_open, copies[0].users)):
        return dtype
    rounded: torch.dtype = copies[0].meta["val"].dtype
    adds[0].meta["val"] = adds[0].meta["val"].to(rounded)
    return rounded


@functools.cache
def _define() -> None:
    library = torch.library.Library("tpu_compile", "FRAGMENT")
    library.define("mm_of_rows(Tensor x, Tensor y, ScalarType dtype) -> Tensor")
    library.impl(
        "mm_of_rows",
        lambda x, y, dtype: x.new_empty((*x.shape[:-1], y.shape[-1]), dtype=dtype),
        "Meta",
    )
    _libraries.append(library)
    register_flop_formula(torch.ops.tpu_compile.mm_of_rows)(_flops)
    if find_lowering(_NAME) is None:
        register(_NAME, _lower)


def _flops(x: Any, y: Any, *_: Any, **__: Any) -> int:
    return 2 * int(torch.Size(x).numel()) * int(y[-1])


def _lower(x: jax.Array, y: jax.Array, dtype: torch.dtype) -> jax.Array:
    wanted = to_numpy_dtype(dtype)
    return contract(x, y, (((x.ndim - 1,), (0,)), ((), ()))).astype(wanted)
