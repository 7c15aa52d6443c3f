"""Evaluates graphs of functional overloads on JAX values."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tpu_compile.control_flow import LOWERINGS, Call
from tpu_compile.draws import Draws
from tpu_compile.lookup import lowering_of, outputs, subgraph
from tpu_compile.numbers import ITEM
from tpu_compile.random_states import state_of
from tpu_compile.recomputation import Barriers
from tpu_compile.sizes import Sizes
from tpu_core.lowering.evaluate import to_jax
from tpu_core.pjrt import client as pjrt
from tpu_core.recorder.compute import call_node


def is_arithmetic(value: Any) -> bool:
    """Whether a node's metadata is that of a number."""
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def evaluate(
    module: GraphModule,
    arguments: Iterable[Any],
    sizes: Sizes,
    draws: Draws,
    same: Mapping[Node, Node] | None = None,
) -> Mapping[Node, Any]:
    """The value of each node.

    Args:
        module: A graph that can be lowered.
        arguments: JAX values of its placeholders, and numbers for sizes.
        sizes: Values of the symbols in its metadata.
        draws: Gives the keys of random ops.
        same: Calls that are left out, with those whose results stand in for theirs.
    """
    same = same or {}
    values: dict[Node, Any] = {}
    given = iter(arguments)
    barriers = Barriers(module)
    for node in module.graph.nodes:
        if node.op == "output":
            break
        read = barriers.values(node, values)
        meta = node.meta.get("val")
        if node.op == "placeholder":
            value = next(given)
            # A number that a loop computes: it must not widen what it meets.
            values[node] = pjrt.weak(value) if is_arithmetic(meta) and _is_array(value) else value
        elif node in same:
            values[node] = values[same[node]]
        elif node.op == "get_attr":
            constant = getattr(module, node.target)
            values[node] = constant if subgraph(node) else to_jax(constant)
        elif is_arithmetic(meta) and sizes.knows(meta):
            values[node] = sizes.value(meta)
        elif node.target is operator.getitem:
            source, index = node.args
            values[node] = read[source][index]
        elif node.target is ITEM:
            values[node] = pjrt.weak(jnp.reshape(read[node.args[0]], ()))
        elif node.target is not state_of:
            values[node] = _call(node, read, sizes, draws)
    return values


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype")


def call(
    module: GraphModule, arguments: Sequence[Any], sizes: Sizes, draws: Draws
) -> tuple[Any, ...]:
    """What a graph returns; arguments as of `evaluate`."""
    values = evaluate(module, arguments, sizes, draws)
    return tuple(values[r] if isinstance(r, Node) else r for r in outputs(module))


def _call(node: Node, values: Mapping[Node, Any], sizes: Sizes, draws: Draws) -> Any:
    op: Any = node.target
    entry = lowering_of(op)
    if entry is not None:
        key = draws.key(node) if entry.random else None
        return call_node(node, entry, values, key, sizes.value)
    args: Any = map_arg(node.args, values.__getitem__)
    kwargs: Any = map_arg(node.kwargs, values.__getitem__)
    if op in LOWERINGS:
        return LOWERINGS[op](Call(node, call, sizes, draws), *args, **kwargs)
    return op(*args, **kwargs)  # arithmetic on numbers that the program computes
