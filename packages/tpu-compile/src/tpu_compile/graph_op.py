"""The op ``tpu_compile::graph``, which stands for a graph of functional ATen ops.

Its lowering evaluates the graph on JAX values: tracing, padding, donation, the cache and the
counters are those of eager's ops.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import torch
from torch.fx import GraphModule, Node

from tpu_compile import numbers, random_states
from tpu_compile.call_numbers import CallNumbers
from tpu_compile.evaluate import evaluate
from tpu_compile.fx_utils import is_tensor, line_of, outputs
from tpu_compile.graph import Graph
from tpu_compile.inner_sizes import InnerSizes
from tpu_compile.jagged import jagged_sizes
from tpu_compile.keys import key_of
from tpu_compile.op_digests import op_digests
from tpu_compile.repeats import repeats
from tpu_compile.rng import STATE, WORDS, Seeds, Words
from tpu_compile.size_inputs import split_inputs
from tpu_compile.sizes import Sizes, Symbols
from tpu_core.errors import UnsupportedOpError
from tpu_core.extend import (
    flush,
    hide_lines_of,
    is_tracing,
    op_caller,
    register,
    register_graph_op,
    to_numpy_dtype,
)

_NAME = "tpu_compile.graph.default"

# Graphs by key; a recorded program refers to its graph by the key alone. Until `forget_graphs`.
GRAPHS: dict[str, Graph] = {}


def forget_graphs() -> None:
    """Empty `GRAPHS`; what is recorded is run first. A function that is still there comes back."""
    if GRAPHS:
        for device in range(torch.accelerator.device_count()):
            with contextlib.suppress(Exception):  # raised where the results are read
                flush(device, "torch.compiler.reset()")
        GRAPHS.clear()


def graph_of(module: GraphModule, has_numbers: bool = True) -> Graph:
    """The graph of a module of functional overloads, which the op can stand for.

    Args:
        module: The module.
        has_numbers: Whether inputs that are no sizes may be numbers; else they are sizes too.
    """
    _define()
    nodes = list(module.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    states = {n.meta[STATE] for n in nodes if STATE in n.meta}
    tensors = [i for i, n in enumerate(inputs) if is_tensor(n) and n not in states]
    values = [n.meta.get("val") for n in inputs]
    given = [values[i] for i in tensors]
    integers = [i for i, v in enumerate(values) if isinstance(v, (int, torch.SymInt))]
    sizes, passed = integers, CallNumbers(inputs)
    if has_numbers:
        sizes, *own = split_inputs(module, inputs, given)
        passed = CallNumbers(inputs, *own)
    counts = [values[i] for i in sizes]
    symbols = Symbols(counts, given)
    of_host = Symbols([values[i] for i in integers], given)
    results = outputs(module)
    return Graph(
        key=key_of(module, symbols),
        module=module,
        symbols=symbols,
        count=len(inputs),
        tensors=tensors,
        sizes=sizes,
        passed=passed,
        inputs=of_host,
        integers=integers,
        given=given,
        counts=counts,
        inner=InnerSizes(module, symbols),
        results=results,
        made=[_is_made(r, of_host.known) for r in results],
        seeds=Seeds(module),
        same=repeats(module, symbols),
    )


def _is_made(result: Any, known: AbstractSet[Any]) -> bool:
    """Return whether the program returns a result: a tensor, or a number that it computes."""
    if not isinstance(result, Node) or result.target is random_states.state_of:
        return False
    return is_tensor(result) or not numbers.are_known(result.meta["val"], known)


@functools.cache
def _define() -> None:
    """Define the op, what it returns, and its lowering."""
    hide_lines_of(__file__)
    library = torch.library.Library("tpu_compile", "DEF")
    library.define(
        "graph(Tensor[] inputs, int[] sizes, int[] inner_sizes, Scalar[] seeds, str key)"
        " -> Tensor[]"
    )
    library.impl("graph", _meta, "Meta")
    library.impl("graph", _batched, "Batched")
    _libraries.append(library)
    register(_NAME, _lower, identity=_identity, symbolic=True)
    from tpu_compile.updates import updates

    register_graph_op(_NAME, GRAPHS.__getitem__, updates, _line_of_node)


_libraries: list[torch.library.Library] = []  # an op ends with its library


def recorded(graph: Graph) -> Callable[..., Any]:
    """A function that records the graph; it takes a list of the arguments."""
    from functorch.compile import make_boxed_func

    if _has_only_tensors(graph):
        return _of_tensors(graph)
    boxed: Callable[..., Any] = make_boxed_func(functools.partial(run_graph, graph))
    return boxed


def _has_only_tensors(graph: Graph) -> bool:
    """Return whether a graph is a function of tensors that gives tensors and constants."""
    results = zip(graph.results, graph.made)
    plain = all(is_tensor(r) if made else not isinstance(r, Node) for r, made in results)
    given = 0 < len(graph.tensors) == graph.count and not graph.inner
    return plain and not len(graph.seeds) and given


def _of_tensors(graph: Graph) -> Callable[[list[Any]], list[Any]]:
    op, key, whole = torch.ops.tpu_compile.graph.default, graph.key, all(graph.made)

    def general(tensors: list[Any]) -> list[Any]:
        made: list[Any] = op(tensors, (), (), (), key)
        return made

    # The dispatcher and its boxing would cost as much as XLA's call.
    record = op_caller("tpu_compile::graph", general, ((), (), (), key))

    def run(tensors: list[Any]) -> list[Any]:
        GRAPHS[key] = graph
        made: list[Any] = record(tensors)
        if whole:
            return made
        rest = iter(made)
        return [next(rest) if is_made else r for r, is_made in zip(graph.results, graph.made)]

    vars(run)["_boxed_call"] = True
    return run


def run_graph(graph: Graph, *args: Any) -> list[Any]:
    """Record the graph with arguments of all kinds."""
    GRAPHS[graph.key] = graph
    # A graph that makes all its tensors is sent to the device by one that it does not read.
    tensors = [args[i] for i in graph.tensors] or [torch.empty(0, device="tpu")]
    integers, jagged = jagged_sizes([args[i] for i in graph.integers], graph.inputs.numbers)
    value = dict(zip(graph.integers, integers, strict=True))
    words = graph.seeds.words(tensors[0].device, args)
    flat = [word for draw in words for word in draw]
    bound = graph.inputs.bind(integers, [t.shape for t in tensors])
    own = graph.passed.values({**dict(enumerate(args)), **value}, bound)
    seeds = graph.passed.as_scalars(own, flat)
    sizes = [value[i] for i in graph.sizes]
    inner: list[int] = []
    if graph.inner:
        inner = graph.inner_sizes(graph.values(sizes, [t.shape for t in tensors]))
    made = iter(torch.ops.tpu_compile.graph(tensors, sizes, inner, seeds, graph.key))

    def result(wanted: Any, is_made: bool) -> Any:
        if is_made:
            found = next(made)
            return found if is_tensor(wanted) else found.item()
        if isinstance(wanted, Node) and wanted.target is random_states.state_of:
            return graph.seeds.state(wanted, words)
        value = _value(wanted)
        return jagged.value(value) if jagged and jagged.has(value) else bound.value(value)

    return list(map(result, graph.results, graph.made))


def _value(result: Any) -> Any:
    return result.meta["val"] if isinstance(result, Node) else result


def try_to_lower(graph: Graph) -> None:
    """Trace a graph, for any values of its open sizes.

    Raises:
        NotPaddableError: It cannot be lowered.
    """
    values = [max(size.low, 2) for size in graph.open]
    shapes = [shape for shape, _ in graph.operands(values)]
    given = [
        jax.ShapeDtypeStruct(shape, to_numpy_dtype(x.dtype))
        for shape, x in zip(shapes, graph.given, strict=True)
    ]
    lower = functools.partial(_evaluate, graph, sizes=graph.numbers(values), seeds=())
    with jax.enable_x64(True):
        jax.eval_shape(lower, given)


def _meta(
    inputs: list[torch.Tensor],
    sizes: list[int],
    inner_sizes: list[int],
    seeds: list[Any],
    key: str,
) -> list[torch.Tensor]:
    graph = GRAPHS[key]
    bound = graph.symbols.bind(sizes, [x.shape for x in inputs])
    made = []
    for result, is_made in zip(graph.results, graph.made):
        if is_made and is_tensor(result):
            like = result.meta["val"]
            shape, strides = bound.all(like.shape), bound.all(like.stride())
            made.append(torch.empty_strided(shape, strides, dtype=like.dtype, device="meta"))
        elif is_made:
            made.append(torch.empty((), dtype=torch.int64, device="meta"))
    return made


def _batched(
    inputs: list[torch.Tensor],
    sizes: list[int],
    inner_sizes: list[int],
    seeds: list[Any],
    key: str,
) -> list[torch.Tensor]:
    """The graph op by op, in ``is_grads_batched=True``, where PyTorch batches each op.

    Raises:
        UnsupportedOpError: It draws random numbers, or gives numbers that it computes.
    """
    graph = GRAPHS[key]
    returned = (r for r, is_made in zip(graph.results, graph.made) if is_made)
    if len(graph.seeds) or not all(map(is_tensor, returned)):
        raise UnsupportedOpError(
            "A compiled graph that draws random numbers or computes sizes has no batches of "
            "gradients.",
            remedy="Leave out is_grads_batched=True and vectorize=True, or the compilation.",
        )
    values: list[Any] = [None] * graph.count
    for positions, given in ((graph.tensors, inputs), (graph.sizes, sizes)):
        for i, value in zip(positions, given):
            values[i] = value
    results = random_states.OpByOp(graph.module).run_with(values, graph.passed.of_scalars(seeds))
    return [r for r, made in zip(results, graph.made) if made]


def _identity(
    inputs: Sequence[Any], sizes: list[int], inner_sizes: list[int], seeds: list[Any], key: str
) -> str:
    """Of those of its ops that have one: the graph's key knows them by name."""
    graph = GRAPHS[key]
    bound = graph.symbols.bind(sizes, [x.shape for x in inputs])
    return " ".join(op_digests(graph.module, bound))


def _lower(
    inputs: Sequence[jax.Array],
    sizes: Sequence[int],
    inner_sizes: Sequence[int],
    seeds: Sequence[Any],
    key: str,
) -> list[jax.Array]:
    return _evaluate(GRAPHS[key], inputs, sizes, seeds)


def _evaluate(
    graph: Graph, inputs: Sequence[jax.Array], sizes: Sequence[int], seeds: Sequence[Any]
) -> list[jax.Array]:
    draws = WORDS * len(graph.seeds)
    given = {**dict(zip(graph.tensors, inputs)), **dict(zip(graph.sizes, sizes))}
    places = graph.module.graph.find_nodes(op="placeholder")
    passed = graph.passed.traced(seeds[draws:])
    bound = graph.symbols.bind(sizes, [x.shape for x in inputs])
    arguments = [
        passed[n] if n in passed else given.get(i, _fraction(n, bound))
        for i, n in enumerate(places)
    ]
    if graph.bounded is not None:
        results = graph.bounded.results(arguments, bound)
        return [r for r, is_made in zip(results, graph.made, strict=True) if is_made]
    same = graph.same if is_tracing() else {}
    values = evaluate(graph.module, arguments, bound, Words(seeds[:draws]), same, passed)
    return [values[r] for r, is_made in zip(graph.results, graph.made) if is_made]


def _fraction(node: Node, sizes: Sizes) -> Any:
    """Value of a backward graph's input that forward worked out from sizes, such as 0.1 / n."""
    value = node.meta.get("val")
    is_known = isinstance(value, torch.SymFloat) and sizes.knows(value)
    return sizes.value(value) if is_known else None


def _line_of_node(key: str, name: str) -> str | None:
    graph = GRAPHS.get(key)
    return _lines(graph.module).get(name) if graph is not None else None


@functools.lru_cache(maxsize=16)
def _lines(module: GraphModule) -> dict[str, str | None]:
    return {node.name: line_of(node) for node in module.graph.nodes}
