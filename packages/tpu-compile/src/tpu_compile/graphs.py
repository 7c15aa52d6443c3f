"""Graphs of functional ATen ops, each recorded as one op of the fused trace.

The op is ``tpu_compile::graph``: its lowering evaluates the graph on JAX values, so that tracing,
padding, donation, the cache and the counters are those of eager's ops.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten

from tpu_compile.graph import Graph, Made
from tpu_compile.sizes import Symbols
from tpu_compile.steps import (
    Caller,
    evaluate,
    is_number,
    is_tensor,
    lowering_of,
    once,
    steps_of,
)
from tpu_core import _C
from tpu_core.lowering.evaluate import call_lowering, to_jax
from tpu_core.lowering.random import derive_key
from tpu_core.lowering.registry import Lowering, register
from tpu_core.padding.outline import outlining
from tpu_core.padding.told import tells
from tpu_core.recorder import decompose
from tpu_core.recorder.variants import overload_name
from tpu_core.runtime import hide_lines_of

_NAME = "tpu_compile.graph.default"


# Graphs by key; a recorded program refers to its graph by the key alone.
GRAPHS: dict[str, Graph] = {}


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions of overloads that have no lowering."""
    return {op: fn for op, fn in decompose.table().items() if lowering_of(op) is None}


def compile_graph(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A function that records the graph; what AOTAutograd calls for forward and backward.

    Args:
        module: A graph of functional overloads.
        example_inputs: Fake tensors, and symbolic sizes where it is dynamic.
    """
    from functorch.compile import make_boxed_func

    if not _can_be_lowered(module):
        # Each of its ops is recorded, and falls back where it has to, as in eager.
        function: Callable[..., Any] = make_boxed_func(torch.fx.Interpreter(module).run)
        return function
    graph = _graph_of(module)
    if graph is None:
        function = make_boxed_func(torch.fx.Interpreter(module).run)
        return function
    _define()
    GRAPHS[graph.key] = graph
    boxed: Callable[..., Any] = make_boxed_func(functools.partial(_run, graph))
    return boxed


def _run(graph: Graph, *args: Any) -> list[Any]:
    # A graph that makes all its tensors is sent to the device by one that it does not read.
    tensors = [args[i] for i in graph.tensors] or [torch.empty(0, device="tpu")]
    numbers = [int(args[i]) for i in graph.sizes]
    seeds = [word for _ in range(graph.draws) for word in _words(tensors[0].device)]
    made = iter(torch.ops.tpu_compile.graph(tensors, numbers, seeds, graph.key))
    sizes = graph.symbols.bind(numbers, [t.shape for t in tensors])
    return [next(made) if isinstance(r, Made) else sizes.value(r) for r in graph.results]


def _words(device: torch.device) -> tuple[int, ...]:
    seed, offset = _C.next_seed(_C.default_generator(device.index))
    mask = 0xFFFFFFFF
    return seed & mask, seed >> 32, offset & mask, offset >> 32


def _can_be_lowered(module: GraphModule) -> bool:
    for node in module.graph.nodes:
        value = node.meta.get("val")
        for v in tree_flatten(value)[0]:
            if isinstance(v, torch.Tensor) and v.device.type != "tpu" and v.dim():
                return False
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            if value.device.type != "tpu":
                return False
        if node.op == "call_function":
            op = node.target
            if isinstance(op, torch._ops.OpOverload):
                if lowering_of(op) is None and not _is_size(op):
                    return False
                if op is torch.ops.aten.as_strided.default and not _is_plain(node.args[0]):
                    return False
            elif op is not operator.getitem and not is_number(value):
                return False
    return all(
        not isinstance(r, Node) or not is_tensor(r) or r.meta["val"].device.type == "tpu"
        for r in _outputs(module)
    )


def _is_plain(node: Any) -> bool:
    """Whether a tensor's elements lie in memory in order: what `as_strided` goes by."""
    value = node.meta["val"]
    return bool(value.is_contiguous() and value.storage_offset() == 0)


def _is_size(op: Any) -> bool:
    return overload_name(op).startswith(("aten.sym_size", "aten.sym_numel", "aten.sym_stride"))


def _outputs(module: GraphModule) -> list[Any]:
    (output,) = [n for n in module.graph.nodes if n.op == "output"]
    return list(output.args[0]) if isinstance(output.args[0], (tuple, list)) else [output.args[0]]


def _graph_of(module: GraphModule) -> Graph | None:
    """The graph, or None where a size in it follows from no input."""
    nodes = list(module.graph.nodes)
    inputs = [n.meta.get("val") for n in nodes if n.op == "placeholder"]
    tensors = [i for i, v in enumerate(inputs) if isinstance(v, torch.Tensor)]
    sizes = [i for i, v in enumerate(inputs) if isinstance(v, (int, torch.SymInt))]
    symbols = Symbols([inputs[i] for i in sizes], [inputs[i] for i in tensors])
    if not all(symbols.known(t) for n in nodes for t in _terms(n, symbols)):
        return None
    number = {node: i for i, node in enumerate(nodes)}
    results = []
    for r in _outputs(module):
        value = r.meta["val"] if isinstance(r, Node) else r
        if isinstance(value, torch.Tensor):
            results.append(_made(number[r], value, symbols))
        else:
            results.append(symbols.term(value))
    draws = sum(n.op == "call_function" and _is_random(n.target) for n in nodes)
    key = _key(module, symbols)
    steps = steps_of(module, symbols)
    given = [_made(i, inputs[i], symbols) for i in tensors]
    numbers = [symbols.term(inputs[i]) for i in sizes]
    return Graph(key, steps, once(steps), symbols, tensors, sizes, given, numbers, results, draws)


def _made(step: int, value: torch.Tensor, symbols: Symbols) -> Made:
    shape, strides = (tuple(map(symbols.term, n)) for n in (value.shape, value.stride()))
    return Made(step, shape, strides, value.dtype)


def _terms(node: Node, symbols: Symbols) -> Iterator[Any]:
    for value in tree_flatten(node.meta.get("val"))[0]:
        if isinstance(value, torch.Tensor):
            yield from map(symbols.term, (*value.shape, *value.stride()))
        else:
            yield symbols.term(value)


def _is_random(target: Any) -> bool:
    entry = lowering_of(target)
    return entry is not None and entry.random


@functools.cache
def _sources() -> bytes:
    # Programs stay in the cache folder: they must not outlive a change of this package.
    return b"".join(f.read_bytes() for f in sorted(Path(__file__).parent.glob("*.py")))


def _key(module: GraphModule, symbols: Symbols) -> str:
    """Hash of nodes, arguments, geometry and constants, and of what evaluates them."""
    number = {node: i for i, node in enumerate(module.graph.nodes)}
    digest = hashlib.sha256(_sources())
    # Buckets go by the ranges of sizes.
    digest.update(repr([(s.low, s.high, s.varies) for s in symbols.open]).encode())

    def text(value: Any) -> str:
        if isinstance(value, Node):
            return f"%{number[value]}"
        if isinstance(value, (list, tuple)):
            return f"[{','.join(map(text, value))}]"
        if isinstance(value, torch.Tensor):
            shape, strides = (text(tuple(n)) for n in (value.shape, value.stride()))
            return f"{value.dtype}{shape}{strides}{value.device.type}"
        return f"{type(value).__name__}:{symbols.term(value)}"

    for node in module.graph.nodes:
        parts = [node.op, str(node.target) if node.op == "call_function" else ""]
        parts += [text(a) for a in node.args]
        parts += [f"{k}={text(v)}" for k, v in sorted(node.kwargs.items())]
        parts.append(text(node.meta.get("val")))
        digest.update("|".join(parts).encode() + b"\n")
        if node.op == "get_attr":
            constant = getattr(module, str(node.target))
            digest.update(to_jax(constant).tobytes() if constant.numel() else b"")
    return digest.hexdigest()


@functools.cache
def _define() -> None:
    """Define the op, what it returns, and its lowering."""
    hide_lines_of(__file__)
    library = torch.library.Library("tpu_compile", "DEF")
    library.define("graph(Tensor[] inputs, int[] sizes, Scalar[] seeds, str key) -> Tensor[]")
    library.impl("graph", _meta, "Meta")
    _libraries.append(library)
    register(_NAME, _lower)
    tells(_NAME, GRAPHS.__getitem__)


_libraries: list[torch.library.Library] = []  # an op ends with its library


def _meta(
    inputs: list[torch.Tensor], sizes: list[int], seeds: list[Any], key: str
) -> list[torch.Tensor]:
    graph = GRAPHS[key]
    bound = graph.symbols.bind(sizes, [x.shape for x in inputs])
    return [
        torch.empty_strided(bound.all(r.shape), bound.all(r.strides), dtype=r.dtype, device="meta")
        for r in graph.results
        if isinstance(r, Made)
    ]


def _lower(
    inputs: Sequence[jax.Array], sizes: Sequence[int], seeds: Sequence[Any], key: str
) -> list[Any]:
    graph = GRAPHS[key]
    bound = graph.symbols.bind(sizes, [x.shape for x in inputs])
    steps = graph.once if outlining() else graph.steps
    values = evaluate(steps, inputs, sizes, bound, _caller(iter(seeds)))
    return [values[r.step] for r in graph.results if isinstance(r, Made)]


def _caller(words: Iterator[Any]) -> Caller:
    """Calls lowerings; a random op takes the next four words of seeds."""

    def call(
        entry: Lowering, args: tuple[Any, ...], kwargs: dict[str, Any], out: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        key = None
        if entry.random:
            key = derive_key(*(jnp.asarray(next(words)).astype(jnp.uint32) for _ in range(4)))
        result: tuple[Any, ...] = call_lowering(entry, args, kwargs, out, key)
        return result

    return call
