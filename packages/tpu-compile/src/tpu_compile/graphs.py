"""Compilation of graphs of functional ATen ops, each recorded as one op of the fused trace.

What cannot be part of a program (`tpu_compile.faults`) is taken out of a graph first: constants on
the CPU, inputs to move, ops that run apart.
"""

from __future__ import annotations

import copy
import functools
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten

from tpu_compile import random_states, reports
from tpu_compile.effects import unwrap_checks
from tpu_compile.faults import (
    MAKES_SIZE,
    NUMBER,
    ON_CPU,
    OUT_OF_ORDER,
    Fault,
    constants,
    faults,
    known_symbols,
)
from tpu_compile.fx_utils import has_random_op, is_tensor, lowering_of, outputs, part_of
from tpu_compile.graph_op import graph_of, recorded, run_graph, try_to_lower
from tpu_compile.graph_splitting import in_parts
from tpu_compile.keys import key_of
from tpu_compile.lane_permutation import move_lanes
from tpu_compile.unbacked import bounded
from tpu_core.errors import NotPaddableError
from tpu_core.extend import Target
from tpu_core.extend import decompositions as lowered_by_pytorch

logger = logging.getLogger("tpu_compile")


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions of overloads that have no lowering."""
    found = {op: fn for op, fn in lowered_by_pytorch().items() if lowering_of(op) is None}
    return found | {op: functools.partial(_composite, op) for op in _COMPOSITES}


# Ops without a decomposition in Python whose kernel for all devices calls others, as in eager.
_COMPOSITES = (torch.ops.aten.linalg_pinv.atol_rtol_tensor,)


def _composite(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    key = torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional
    return op._op_dk(key, *args, **kwargs)


def compile_graph(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A function that records the graph; what AOTAutograd calls for forward and backward.

    Args:
        module: A graph of functional overloads.
        example_inputs: Fake tensors, and symbolic sizes where it is dynamic.
    """
    if Target.current().platform == "tpu":
        move_lanes(module)
    unwrap_checks(module)
    _fold_windows(module)
    found = list(faults(module))
    if found:
        for form in (_compile_without_constants, _compile_with_tensors_moved):
            if (compiled := form(module, example_inputs)) is not None:
                return compiled
        from functorch.compile import make_boxed_func

        function = _run_of_bounded(module) or _run_in_parts(module, found)
        apart: Callable[..., Any] = make_boxed_func(function)
        return apart
    random_states.unwrap(module)
    return recorded(graph_of(module))


def _compile_with_tensors_moved(
    module: GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any] | None:
    """A function that moves inputs from the CPU to the device, numbers and indices; None where
    there are none, or the graph could not be lowered all the same.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    places = [i for i, n in enumerate(inputs) if _is_input_on_cpu(n)]
    given = (v for n in module.graph.nodes for v in tree_flatten(n.meta.get("val"))[0])
    device = next((v.device for v in given if _is_on_device(v)), None)
    if not places or device is None:
        return None
    moved = GraphModule(module, copy.deepcopy(module.graph))
    moved_inputs = moved.graph.find_nodes(op="placeholder")
    for i in places:
        value = moved_inputs[i].meta["val"]
        with value.fake_mode:
            moved_inputs[i].meta["val"] = value.to(device)
    if any(faults(moved)) or not {inputs[i] for i in places}.isdisjoint(outputs(module)):
        return None
    run = compile_graph(moved, example_inputs)

    def with_moved(arguments: list[Any]) -> Any:
        for i in places:
            arguments[i] = arguments[i].to(device)
        return run(arguments)

    vars(with_moved)["_boxed_call"] = True
    return with_moved


def _is_input_on_cpu(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or random_states.is_state(node):
        return False
    return value.device.type == "cpu" and hasattr(value, "fake_mode")


def _compile_without_constants(
    module: GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any] | None:
    """A function whose results on the CPU the host computes, once or of integers; None where none
    are so.

    What indexes with a list keeps that for backward, and ``math.sqrt(n)`` is a tensor to Dynamo.
    """
    fixed = constants(module, known_symbols(module))
    results = outputs(module)
    wanted = [i for i, r in enumerate(results) if r in fixed and _is_on_cpu(r)]
    nodes = _ancestors([results[i] for i in wanted])
    if not wanted or any(n.op == "placeholder" and is_tensor(n) for n in nodes):
        return None
    placeholders = module.graph.find_nodes(op="placeholder")
    given = [i for i, n in enumerate(placeholders) if n in nodes]
    made = random_states.OpByOp(
        part_of(module, nodes, [placeholders[i] for i in given], [results[i] for i in wanted])
    )
    rest = GraphModule(module, copy.deepcopy(module.graph))
    (output,) = rest.graph.find_nodes(op="output")
    kept = [None if i in wanted else r for i, r in enumerate(outputs(rest))]
    output.args = (tuple(kept),)
    rest.recompile()
    once = None if given else made.run()
    run = compile_graph(rest, example_inputs)

    def with_constants(arguments: list[Any]) -> list[Any]:
        values = made.run(*(arguments[i] for i in given)) if once is None else once
        found = list(run(arguments))
        for i, value in zip(wanted, values, strict=True):
            found[i] = value.clone()
        return found

    vars(with_constants)["_boxed_call"] = True
    return with_constants


def _ancestors(nodes: Sequence[Node]) -> list[Node]:
    """Some nodes and all that they follow from, in order."""
    found: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return sorted(found)


def _fold_windows(module: GraphModule) -> None:
    """Compute what ops of ATen without a lowering make of numbers alone: windows, say."""
    graph = module.graph
    for i, node in enumerate(list(graph.nodes)):
        op: Any = node.target
        is_call = node.op == "call_function" and str(op).startswith("aten.")
        if not is_call or node.all_input_nodes or not is_tensor(node) or has_random_op(node):
            continue
        if lowering_of(op) is None:
            setattr(module, f"tpu_window_{i}", op(*node.args, **node.kwargs))
            with graph.inserting_before(node):
                constant = graph.create_node("get_attr", f"tpu_window_{i}")
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
            graph.erase_node(node)


def _is_on_cpu(node: Node) -> bool:
    return is_tensor(node) and node.meta["val"].device.type == "cpu"


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "tpu"


def _run_in_parts(module: GraphModule, found: Sequence[Fault]) -> Callable[..., Any]:
    """A function that runs ops with a fault by eager, and the others compiled where it can be."""
    of_size = {f.node for f in found if f.why in (MAKES_SIZE, NUMBER)}
    faulty = {f.node: f.why for f in found}
    # What a part gives has no memory around it.
    of_memory = [f for f in found if f.why == OUT_OF_ORDER and _first(f.node).op != "placeholder"]
    parts = None
    if not of_memory:
        parts = in_parts(module, known_symbols(module), faulty.keys() - of_size, _compile_part)
    if parts is None:
        for node, why in faulty.items():
            if faulty.keys().isdisjoint(node.all_input_nodes):
                why = f"{why}, and this graph cannot be split: it runs op by op"
                reports.split(node, why)
        return random_states.OpByOp(module).run
    for node in module.graph.nodes:
        if node in parts.apart and node.target is not operator.getitem:
            # The user has asked for sizes that depend on values, each of which reads.
            why, warns = faulty.get(node, ON_CPU), node not in of_size
            reports.split(node, why, warns=warns)
    return parts


def _first(node: Node) -> Node:
    return node.all_input_nodes[0]


def _compile_part(module: GraphModule) -> Callable[..., Any]:
    run = compile_graph(module, ())
    return lambda *args: run(list(args))


def _run_of_bounded(module: GraphModule) -> Callable[..., Any] | None:
    """A function that records a graph that computes sizes; None where they have no bound."""
    parts = bounded(module, known_symbols(module))
    if parts is None or any(faults(parts.first)) or any(faults(parts.second)):
        return None
    # The key is that of the graph with its checks: they are the sizes' bounds.
    graph = replace(graph_of(parts.module, has_numbers=False), key=key_of(module), bounded=parts)
    try:
        try_to_lower(graph)
    except NotPaddableError as error:
        logger.info("a bounded size does not help, it runs op by op: %s%s", error, error.op)
        return None
    if not parts.checks:
        return functools.partial(run_graph, graph)

    def run(*args: Any) -> list[Any]:
        results = run_graph(graph, *args)
        count = len(results) - len(parts.sizes)
        parts.verify(results[count:])
        return results[:count]

    return run
