"""Graphs of functional ATen ops, each recorded as one op of the fused trace.

The op is ``tpu_compile::graph``: its lowering evaluates the graph on JAX values, so that tracing,
padding, donation, the cache and the counters are those of eager's ops.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten

from tpu_compile import control_flow, numbers, random_states, recomputation
from tpu_compile.draws import NUMBER, STATE, Seeds, Words
from tpu_compile.evaluate import evaluate, is_arithmetic
from tpu_compile.lookup import lowering_of, outputs, subgraph, subgraphs
from tpu_compile.sizes import Sizes, concrete
from tpu_core.lowering.evaluate import to_jax
from tpu_core.lowering.registry import register
from tpu_core.recorder import decompose
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
        seeds: Words of the ops that draw random numbers.
    """

    key: str
    module: GraphModule
    tensors: list[int]
    sizes: list[int]
    results: list[Any]
    seeds: Seeds

    def inputs(self) -> list[Node]:
        """The placeholders."""
        return [n for n in self.module.graph.nodes if n.op == "placeholder"]

    def bindings(self, sizes: Sequence[int]) -> Sizes:
        """Value of each symbol in the graph's sizes."""
        placeholders = self.inputs()
        return Sizes((placeholders[i].meta["val"], n) for i, n in zip(self.sizes, sizes))


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
        function: Callable[..., Any] = make_boxed_func(random_states.OpByOp(module).run)
        return function
    random_states.unwrap(module)
    _define()
    graph = _graph_of(module)
    GRAPHS[graph.key] = graph
    boxed: Callable[..., Any] = make_boxed_func(functools.partial(_run, graph))
    return boxed


def _run(graph: Graph, *args: Any) -> list[Any]:
    # A graph that makes all its tensors is sent to the device by one that it does not read.
    tensors = [args[i] for i in graph.tensors] or [torch.empty(0, device="tpu")]
    sizes = [int(args[i]) for i in graph.sizes]
    words = graph.seeds.words(tensors[0].device, args)
    seeds = [word for draw in words for word in draw]
    made = iter(torch.ops.tpu_compile.graph(tensors, sizes, seeds, graph.key))
    bindings = graph.bindings(sizes)

    def result(wanted: Any) -> Any:
        if isinstance(wanted, Node) and wanted.target is random_states.state_of:
            return graph.seeds.state(wanted, words)
        value = _value(wanted)
        if not _is_made(wanted, bindings):
            return concrete(value, bindings)
        return next(made) if isinstance(value, torch.Tensor) else next(made).item()

    return [result(r) for r in graph.results]


def _value(result: Any) -> Any:
    return result.meta["val"] if isinstance(result, Node) else result


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_made(result: Any, bindings: Sizes) -> bool:
    """Whether the program returns a result: a tensor, or a number that it computes."""
    if not isinstance(result, Node) or result.target is random_states.state_of:
        return False
    return _is_tensor(result) or not bindings.knows(result.meta["val"])


def _can_be_lowered(module: GraphModule, known: AbstractSet[Any] | None = None) -> bool:
    nodes = list(module.graph.nodes)
    if known is None:
        inputs = (n.meta.get("val") for n in nodes if n.op == "placeholder")
        known = set().union(*(numbers.symbols(v) for v in inputs if is_arithmetic(v)))
    for node in nodes:
        value = node.meta.get("val")
        if random_states.is_state(node):
            continue
        for v in tree_flatten(value)[0]:
            if isinstance(v, torch.Tensor):
                if (v.device.type != "tpu" and v.dim()) or not numbers.symbols(v) <= known:
                    return False
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            if value.device.type != "tpu":
                return False
        if numbers.is_computed(value, known):
            if not numbers.can_be_computed(node):
                return False
        elif node.op == "call_function" and not _can_be_called(node, known):
            return False
    return all(
        not isinstance(r, Node)
        or not _is_tensor(r)
        or r.meta["val"].device.type == "tpu"
        or random_states.is_state(r)
        for r in outputs(module)
    )


def _can_be_called(node: Node, known: AbstractSet[Any]) -> bool:
    op: Any = random_states.drawn_op(node) or node.target
    if isinstance(op, torch._ops.HigherOrderOperator):
        bodies = ((g, numbers.known_inside(g, known)) for g in subgraphs(node))
        return control_flow.can_be_lowered(node) and all(_can_be_lowered(*b) for b in bodies)
    if isinstance(op, torch._ops.OpOverload):
        if op is torch.ops.aten.as_strided.default and not _is_plain(node.args[0]):
            return False
        return lowering_of(op) is not None or _is_size(op)
    return op is operator.getitem or is_arithmetic(node.meta.get("val"))


def _is_plain(node: Any) -> bool:
    """Whether a tensor's elements lie in memory in order: what `as_strided` goes by."""
    value = node.meta["val"]
    return bool(value.is_contiguous() and value.storage_offset() == 0)


def _is_size(op: Any) -> bool:
    return overload_name(op).startswith(("aten.sym_size", "aten.sym_numel", "aten.sym_stride"))


def _graph_of(module: GraphModule) -> Graph:
    nodes = list(module.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    tensors = [
        i
        for i, n in enumerate(inputs)
        if _is_tensor(n) and not any(n is m.meta.get(STATE) for m in nodes)
    ]
    sizes = [i for i, n in enumerate(inputs) if isinstance(n.meta.get("val"), (int, torch.SymInt))]
    return Graph(key_of(module), module, tensors, sizes, outputs(module), Seeds(module))


@functools.cache
def _sources() -> bytes:
    # Programs stay in the cache folder: they must not outlive a change of this package.
    return b"".join(f.read_bytes() for f in sorted(Path(__file__).parent.glob("*.py")))


def key_of(module: GraphModule) -> str:
    """Hash of nodes, arguments, geometry and constants, and of what evaluates them."""
    number = {node: i for i, node in enumerate(module.graph.nodes)}
    # Their own numbers count up in a process.
    checkpoints = {n: str(i) for i, r in enumerate(recomputation.find(module)) for n in r.nodes}
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
        parts += [str(node.meta.get(NUMBER, "")), checkpoints.get(node, "")]
        digest.update("|".join(parts).encode() + b"\n")
        body = subgraph(node)
        if body is not None:
            digest.update(key_of(body).encode())
        elif node.op == "get_attr":
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
        if _is_made(result, bindings):
            like = result.meta["val"]
            if not isinstance(like, torch.Tensor):
                made.append(torch.empty((), dtype=torch.int64, device="meta"))
                continue
            shape = [concrete(n, bindings) for n in like.shape]
            strides = [concrete(n, bindings) for n in like.stride()]
            made.append(torch.empty_strided(shape, strides, dtype=like.dtype, device="meta"))
    return made


def _lower(
    inputs: Sequence[jax.Array], sizes: Sequence[int], seeds: Sequence[Any], key: str
) -> list[jax.Array]:
    graph = GRAPHS[key]
    arrays, numbers_ = dict(zip(graph.tensors, inputs)), dict(zip(graph.sizes, sizes))
    arguments = [(arrays | numbers_).get(i) for i in range(len(graph.inputs()))]
    bindings = graph.bindings(sizes)
    values = evaluate(graph.module, arguments, bindings, Words(seeds))
    return [values[r] for r in graph.results if _is_made(r, bindings)]
