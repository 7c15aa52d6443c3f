"""PyTorch's decompositions, traced once per signature into graphs of overloads that have
lowerings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from tpu_core.lowering.registry import REGISTRY
from tpu_core.recorder.functional_variants import functional, overload_name


@functools.cache
def table() -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions of overloads that have no lowering.

    Example:
        >>> torch.ops.aten.addcmul.default in decompositions()
    """
    from torch._decomp import decomposition_table

    return {
        op: fn
        for op, fn in decomposition_table.items()
        if isinstance(op, torch._ops.OpOverload) and overload_name(op) not in REGISTRY
    }


def decomposition_of(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The functional overload whose decomposition computes ``op``, or None."""
    target = functional(op)
    return target if target is not None and target in table() else None


class UndecomposedOp(LookupError):
    """A decomposition ended in an overload that has no lowering."""


def trace(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> GraphModule:
    """The decomposition of the functional ``op`` as a graph over its flattened tensor arguments.

    Args:
        op: A functional overload with a decomposition.
        args: Its arguments, with meta tensors for tensors.

    Raises:
        UndecomposedOp: The graph contains an overload without a lowering.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = tree_map(
            lambda x: (
                torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu")
                if isinstance(x, torch.Tensor)
                else x
            ),
            args,
        )
    flat: list[torch.Tensor] = []
    template = tree_map(lambda x: _Hole(flat, x) if isinstance(x, torch.Tensor) else x, fakes)
    schema = op._schema.arguments

    def call(*tensors: torch.Tensor) -> Any:
        filled = tree_map(lambda x: tensors[x.index] if isinstance(x, _Hole) else x, template)
        positional = [v for a, v in zip(schema, filled) if not a.kwarg_only]
        keywords = {
            a.name: v
            for a, v in zip(schema, filled)
            if a.kwarg_only and a.name not in ("device", "pin_memory", "generator", "layout")
        }
        return op(*positional, **keywords)

    with enable_python_dispatcher(), mode, torch.no_grad():
        graph = make_fx(
            torch.func.functionalize(call, remove="mutations_and_views"),
            decomposition_table=table(),
            tracing_mode="real",
        )(*flat)
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if overload_name(node.target) not in REGISTRY:
                raise UndecomposedOp(overload_name(node.target))
    return graph


class _Hole:
    """The place of a tensor in an argument list."""

    __slots__ = ("index",)

    def __init__(self, flat: list[torch.Tensor], tensor: torch.Tensor) -> None:
        self.index = len(flat)
        flat.append(tensor)
