"""Graphs of functional ATen ops, each recorded as one op of the fused trace.

The op is ``tpu_compile::graph``: its lowering evaluates the graph on JAX values, so that tracing,
padding, donation, the cache and the counters are those of eager's ops.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten

from tpu_compile.sizes import Sizes, concrete
from tpu_core import _C
from tpu_core.lowering.evaluate import to_jax
from tpu_core.lowering.random import derive_key
from tpu_core.lowering.registry import REGISTRY, Lowering, register
from tpu_core.recorder import decompose
from tpu_core.recorder.compute import call_node
from tpu_core.recorder.variants import overload_name
from tpu_core.runtime import hide_lines_of

_NAME = "tpu_compile.graph.default"


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph that is ready to be recorded.

    Attributes:
        key: Hash of what it computes, the same in every process.
        module: The graph.
        tensors: Positions of its tensor inputs.
        sizes: Positions of its inputs that are sizes.
        results: For each output the node, a number, or None.
        draws: Number of ops that draw random numbers.
    """

    key: str
    module: GraphModule
    tensors: list[int]
    sizes: list[int]
    results: list[Any]
    draws: int

    def inputs(self) -> list[Node]:
        """The placeholders."""
        return [n for n in self.module.graph.nodes if n.op == "placeholder"]

    def bindings(self, sizes: Sequence[int]) -> Sizes:
        """Value of each symbol in the graph's sizes."""
        placeholders = self.inputs()
        return Sizes((placeholders[i].meta["val"], n) for i, n in zip(self.sizes, sizes))


# Graphs by key; a recorded program refers to its graph by the key alone. Until `forget_graphs`.
GRAPHS: dict[str, Graph] = {}


def forget_graphs() -> None:
    """Empty `GRAPHS`; what is recorded is run first. A function that is still there comes back."""
    if GRAPHS:
        for device in range(torch.accelerator.device_count()):
            with contextlib.suppress(Exception):  # raised where the results are read
                _C.flush_all(device, "torch.compiler.reset()")
        GRAPHS.clear()


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions of overloads that have no lowering."""
    return {op: fn for op, fn in decompose.table().items() if lowering_of(op) is None}


def lowering_of(op: Any) -> Lowering | None:
    """The registry's entry for an overload of a graph; a view's is that of its copying form.

    Example:
        >>> lowering_of(torch.ops.aten.t.default).op
        'aten.t_copy.default'
    """
    name = str(op)
    if name in REGISTRY or not isinstance(op, torch._ops.OpOverload) or not op.is_view:
        return REGISTRY.get(name)
    namespace, packet, overload = name.split(".")
    return REGISTRY.get(f"{namespace}.{packet}_copy.{overload}")


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
    _define()
    graph = _graph_of(module)
    run = _run_of_tensors if _has_only_tensors(graph) else _run
    boxed: Callable[..., Any] = make_boxed_func(functools.partial(run, graph))
    return boxed


def _has_only_tensors(graph: Graph) -> bool:
    made = all(isinstance(r, Node) and _is_tensor(r) for r in graph.results)
    return made and not graph.draws and 0 < len(graph.tensors) == len(graph.inputs())


def _run_of_tensors(graph: Graph, *args: Any) -> list[Any]:
    GRAPHS[graph.key] = graph
    made: list[Any] = torch.ops.tpu_compile.graph.default(args, (), (), graph.key)
    return made


def _run(graph: Graph, *args: Any) -> list[Any]:
    GRAPHS[graph.key] = graph
    # A graph that makes all its tensors is sent to the device by one that it does not read.
    tensors = [args[i] for i in graph.tensors] or [torch.empty(0, device="tpu")]
    sizes = [int(args[i]) for i in graph.sizes]
    seeds = [word for _ in range(graph.draws) for word in _words(tensors[0].device)]
    made = iter(torch.ops.tpu_compile.graph(tensors, sizes, seeds, graph.key))
    bindings = graph.bindings(sizes)
    return [
        next(made) if isinstance(r, Node) and _is_tensor(r) else concrete(_value(r), bindings)
        for r in graph.results
    ]


def _words(device: torch.device) -> tuple[int, ...]:
    seed, offset = _C.next_seed(_C.default_generator(device.index))
    mask = 0xFFFFFFFF
    return seed & mask, seed >> 32, offset & mask, offset >> 32


def _value(result: Any) -> Any:
    return result.meta["val"] if isinstance(result, Node) else result


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


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
            elif op is not operator.getitem and not _is_arithmetic(value):
                return False
    return all(
        not isinstance(r, Node) or not _is_tensor(r) or r.meta["val"].device.type == "tpu"
        for r in _outputs(module)
    )


def _is_plain(node: Any) -> bool:
    """Whether a tensor's elements lie in memory in order: what `as_strided` goes by."""
    value = node.meta["val"]
    return bool(value.is_contiguous() and value.storage_offset() == 0)


def _is_size(op: Any) -> bool:
    return overload_name(op).startswith(("aten.sym_size", "aten.sym_numel", "aten.sym_stride"))


def _is_arithmetic(value: Any) -> bool:
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _outputs(module: GraphModule) -> list[Any]:
    (output,) = [n for n in module.graph.nodes if n.op == "output"]
    return list(output.args[0]) if isinstance(output.args[0], (tuple, list)) else [output.args[0]]


def _graph_of(module: GraphModule) -> Graph:
    nodes = list(module.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    tensors = [i for i, n in enumerate(inputs) if _is_tensor(n)]
    sizes = [i for i, n in enumerate(inputs) if isinstance(n.meta.get("val"), (int, torch.SymInt))]
    draws = sum(n.op == "call_function" and _is_random(n.target) for n in nodes)
    return Graph(_key(module), module, tensors, sizes, _outputs(module), draws)


def _is_random(target: Any) -> bool:
    entry = lowering_of(target)
    return entry is not None and entry.random


@functools.cache
def _sources() -> bytes:
    # Programs stay in the cache folder: they must not outlive a change of this package.
    return b"".join(f.read_bytes() for f in sorted(Path(__file__).parent.glob("*.py")))


def _key(module: GraphModule) -> str:
    """Hash of nodes, arguments, geometry and constants, and of what evaluates them."""
    number = {node: i for i, node in enumerate(module.graph.nodes)}
    digest = hashlib.sha256(_sources())

    def text(value: Any) -> str:
        if isinstance(value, Node):
            return f"%{number[value]}"
        if isinstance(value, (list, tuple)):
            return f"[{','.join(map(text, value))}]"
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{list(value.shape)}{list(value.stride())}{value.device.type}"
        return f"{type(value).__name__}:{value}"

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


_libraries: list[torch.library.Library] = []  # an op ends with its library


def _meta(
    inputs: list[torch.Tensor], sizes: list[int], seeds: list[Any], key: str
) -> list[torch.Tensor]:
    graph = GRAPHS[key]
    bindings = graph.bindings(sizes)
    made = []
    for result in graph.results:
        if isinstance(result, Node) and _is_tensor(result):
            like = result.meta["val"]
            shape = [concrete(n, bindings) for n in like.shape]
            strides = [concrete(n, bindings) for n in like.stride()]
            made.append(torch.empty_strided(shape, strides, dtype=like.dtype, device="meta"))
    return made


def _lower(
    inputs: Sequence[jax.Array], sizes: Sequence[int], seeds: Sequence[Any], key: str
) -> list[jax.Array]:
    graph = GRAPHS[key]
    values = evaluate(graph, inputs, sizes, seeds)
    return [values[r] for r in graph.results if isinstance(r, Node) and _is_tensor(r)]


def evaluate(
    graph: Graph, inputs: Sequence[jax.Array], sizes: Sequence[int], seeds: Sequence[Any]
) -> Mapping[Node, Any]:
    """The value of each node, on JAX values.

    Args:
        graph: The graph.
        inputs, sizes: Its inputs, apart.
        seeds: Four words a random op, in the graph's order.
    """
    bindings = graph.bindings(sizes)
    values: dict[Node, Any] = {}
    arrays, numbers, words = iter(inputs), iter(sizes), iter(seeds)
    for node in graph.module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(arrays) if _is_tensor(node) else next(numbers, None)
        elif node.op == "get_attr":
            values[node] = to_jax(getattr(graph.module, node.target))
        elif node.op == "output":
            break
        elif _is_arithmetic(node.meta.get("val")):
            values[node] = concrete(node.meta["val"], bindings)
        elif node.target is operator.getitem:
            source, index = node.args
            values[node] = values[source][index]
        else:
            values[node] = _call(node, values, bindings, words)
    return values


def _call(node: Node, values: Mapping[Node, Any], bindings: Sizes, words: Iterable[Any]) -> Any:
    op: Any = node.target
    entry = lowering_of(op)
    assert entry is not None
    key = None
    if entry.random:
        stream = iter(words)
        key = derive_key(*(jnp.asarray(next(stream)).astype(jnp.uint32) for _ in range(4)))
    return call_node(node, entry, values, key, lambda n: concrete(n, bindings))
