"""Graphs of functional ATen ops, each recorded as one op of the fused trace.

The op is ``tpu_compile::graph``: its lowering evaluates the graph on JAX values, so that tracing,
padding, donation, the cache and the counters are those of eager's ops.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import operator
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import jax
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten

from tpu_compile import numbers, random_states, reports
from tpu_compile.effects import unwrap_checks
from tpu_compile.evaluate import evaluate
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
from tpu_compile.fx_utils import has_random_op, line_of, lowering_of, outputs, part_of
from tpu_compile.graph import Graph
from tpu_compile.graph_splitting import in_parts
from tpu_compile.jagged import jagged_sizes
from tpu_compile.keys import key_of
from tpu_compile.lane_permutation import move_lanes
from tpu_compile.op_digests import op_digests
from tpu_compile.repeats import repeats
from tpu_compile.rng import STATE, Seeds, Words, as_scalars
from tpu_compile.sizes import Sizes, Symbols
from tpu_compile.unbacked import bounded
from tpu_core.errors import NotPaddableError, UnsupportedOpError
from tpu_core.extend import (
    Target,
    flush,
    hide_lines_of,
    is_tracing,
    op_caller,
    register,
    register_graph_op,
    to_numpy_dtype,
)
from tpu_core.extend import decompositions as lowered_by_pytorch

logger = logging.getLogger("tpu_compile")

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
    from functorch.compile import make_boxed_func

    if Target.current().platform == "tpu":
        move_lanes(module)
    unwrap_checks(module)
    _fold_windows(module)
    found = list(faults(module))
    if found:
        for form in (_compile_without_constants, _compile_with_tensors_moved):
            if (compiled := form(module, example_inputs)) is not None:
                return compiled
        function = _run_of_bounded(module) or _run_in_parts(module, found)
        apart: Callable[..., Any] = make_boxed_func(function)
        return apart
    random_states.unwrap(module)
    _define()
    graph = _graph_of(module)
    if _has_only_tensors(graph):
        return _of_tensors(graph)
    boxed: Callable[..., Any] = make_boxed_func(functools.partial(_run, graph))
    return boxed


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
    """A function whose results on the CPU are constants of the graph; None where none are.

    What indexes with a list keeps that for backward.
    """
    fixed = constants(module, set())
    results = outputs(module)
    wanted = [i for i, r in enumerate(results) if r in fixed and _is_on_cpu(r)]
    if not wanted:
        return None
    made = part_of(module, list(fixed), [], [results[i] for i in wanted])
    rest = GraphModule(module, copy.deepcopy(module.graph))
    (output,) = rest.graph.find_nodes(op="output")
    kept = [None if i in wanted else r for i, r in enumerate(outputs(rest))]
    output.args = (tuple(kept),)
    rest.recompile()
    values = dict(zip(wanted, random_states.OpByOp(made).run(), strict=True))
    run = compile_graph(rest, example_inputs)

    def with_constants(arguments: list[Any]) -> list[Any]:
        found = list(run(arguments))
        for i, value in values.items():
            found[i] = value.clone()
        return found

    vars(with_constants)["_boxed_call"] = True
    return with_constants


def _fold_windows(module: GraphModule) -> None:
    """Compute what ops of ATen without a lowering make of numbers alone: windows, say."""
    graph = module.graph
    for i, node in enumerate(list(graph.nodes)):
        op: Any = node.target
        is_call = node.op == "call_function" and str(op).startswith("aten.")
        if not is_call or node.all_input_nodes or not _is_tensor(node) or has_random_op(node):
            continue
        if lowering_of(op) is None:
            setattr(module, f"tpu_window_{i}", op(*node.args, **node.kwargs))
            with graph.inserting_before(node):
                constant = graph.create_node("get_attr", f"tpu_window_{i}")
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
            graph.erase_node(node)


def _is_on_cpu(node: Node) -> bool:
    return _is_tensor(node) and node.meta["val"].device.type == "cpu"


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
    _define()
    # The key is that of the graph with its checks: they are the sizes' bounds.
    graph = replace(_graph_of(parts.module), key=key_of(module), bounded=parts)
    try:
        _try(graph)
    except NotPaddableError as error:
        logger.info("a bounded size does not help, it runs op by op: %s%s", error, error.op)
        return None
    if not parts.checks:
        return functools.partial(_run, graph)

    def run(*args: Any) -> list[Any]:
        results = _run(graph, *args)
        count = len(results) - len(parts.sizes)
        parts.verify(results[count:])
        return results[:count]

    return run


def _try(graph: Graph) -> None:
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


def _has_only_tensors(graph: Graph) -> bool:
    """Return whether a graph is a function of tensors that gives tensors and constants."""
    results = zip(graph.results, graph.made)
    plain = all(_is_tensor(r) if made else not isinstance(r, Node) for r, made in results)
    return plain and not len(graph.seeds) and 0 < len(graph.tensors) == graph.count


def _of_tensors(graph: Graph) -> Callable[[list[Any]], list[Any]]:
    op, key, whole = torch.ops.tpu_compile.graph.default, graph.key, all(graph.made)

    def general(tensors: list[Any]) -> list[Any]:
        made: list[Any] = op(tensors, (), (), key)
        return made

    # The dispatcher and its boxing would cost as much as XLA's call.
    record = op_caller("tpu_compile::graph", general, ((), (), key))

    def run(tensors: list[Any]) -> list[Any]:
        GRAPHS[key] = graph
        made: list[Any] = record(tensors)
        if whole:
            return made
        rest = iter(made)
        return [next(rest) if is_made else r for r, is_made in zip(graph.results, graph.made)]

    vars(run)["_boxed_call"] = True
    return run


def _run(graph: Graph, *args: Any) -> list[Any]:
    GRAPHS[graph.key] = graph
    # A graph that makes all its tensors is sent to the device by one that it does not read.
    tensors = [args[i] for i in graph.tensors] or [torch.empty(0, device="tpu")]
    sizes, jagged = jagged_sizes([args[i] for i in graph.sizes], graph.counts)
    words = graph.seeds.words(tensors[0].device, args)
    seeds = as_scalars(word for draw in words for word in draw)
    made = iter(torch.ops.tpu_compile.graph(tensors, sizes, seeds, graph.key))
    bound = graph.symbols.bind(sizes, [t.shape for t in tensors])

    def result(wanted: Any, is_made: bool) -> Any:
        if is_made:
            found = next(made)
            return found if _is_tensor(wanted) else found.item()
        if isinstance(wanted, Node) and wanted.target is random_states.state_of:
            return graph.seeds.state(wanted, words)
        value = _value(wanted)
        return jagged.value(value) if jagged and jagged.has(value) else bound.value(value)

    return list(map(result, graph.results, graph.made))


def _value(result: Any) -> Any:
    return result.meta["val"] if isinstance(result, Node) else result


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_made(result: Any, known: AbstractSet[Any]) -> bool:
    """Return whether the program returns a result: a tensor, or a number that it computes."""
    if not isinstance(result, Node) or result.target is random_states.state_of:
        return False
    return _is_tensor(result) or not numbers.are_known(result.meta["val"], known)


def _graph_of(module: GraphModule) -> Graph:
    nodes = list(module.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    states = {n.meta[STATE] for n in nodes if STATE in n.meta}
    tensors = [i for i, n in enumerate(inputs) if _is_tensor(n) and n not in states]
    sizes = [i for i, n in enumerate(inputs) if isinstance(n.meta.get("val"), (int, torch.SymInt))]
    values = [n.meta.get("val") for n in inputs]
    given, counts = [values[i] for i in tensors], [values[i] for i in sizes]
    symbols = Symbols(counts, given)
    results = outputs(module)
    return Graph(
        key=key_of(module, symbols),
        module=module,
        symbols=symbols,
        count=len(inputs),
        tensors=tensors,
        sizes=sizes,
        given=given,
        counts=counts,
        results=results,
        made=[_is_made(r, symbols.known) for r in results],
        seeds=Seeds(module),
        same=repeats(module, symbols),
    )


@functools.cache
def _define() -> None:
    """Define the op, what it returns, and its lowering."""
    hide_lines_of(__file__)
    library = torch.library.Library("tpu_compile", "DEF")
    library.define("graph(Tensor[] inputs, int[] sizes, Scalar[] seeds, str key) -> Tensor[]")
    library.impl("graph", _meta, "Meta")
    library.impl("graph", _batched, "Batched")
    _libraries.append(library)
    register(_NAME, _lower, identity=_identity)
    from tpu_compile.updates import updates

    register_graph_op(_NAME, GRAPHS.__getitem__, updates, _line_of_node)


_libraries: list[torch.library.Library] = []  # an op ends with its library


def _batched(
    inputs: list[torch.Tensor], sizes: list[int], seeds: list[Any], key: str
) -> list[torch.Tensor]:
    """The graph op by op, in ``is_grads_batched=True``, where PyTorch batches each op.

    Raises:
        UnsupportedOpError: It draws random numbers, or gives numbers that it computes.
    """
    graph = GRAPHS[key]
    if seeds or not all(_is_tensor(r) for r, made in zip(graph.results, graph.made) if made):
        raise UnsupportedOpError(
            "A compiled graph that draws random numbers or computes sizes has no batches of "
            "gradients.",
            remedy="Leave out is_grads_batched=True and vectorize=True, or the compilation.",
        )
    values: list[Any] = [None] * graph.count
    for positions, given in ((graph.tensors, inputs), (graph.sizes, sizes)):
        for i, value in zip(positions, given):
            values[i] = value
    results = random_states.OpByOp(graph.module).run(*values)
    return [r for r, made in zip(results, graph.made) if made]


def _meta(
    inputs: list[torch.Tensor], sizes: list[int], seeds: list[Any], key: str
) -> list[torch.Tensor]:
    graph = GRAPHS[key]
    bound = graph.symbols.bind(sizes, [x.shape for x in inputs])
    made = []
    for result, is_made in zip(graph.results, graph.made):
        if is_made and _is_tensor(result):
            like = result.meta["val"]
            shape, strides = bound.all(like.shape), bound.all(like.stride())
            made.append(torch.empty_strided(shape, strides, dtype=like.dtype, device="meta"))
        elif is_made:
            made.append(torch.empty((), dtype=torch.int64, device="meta"))
    return made


def _line_of_node(key: str, name: str) -> str | None:
    graph = GRAPHS.get(key)
    return _lines(graph.module).get(name) if graph is not None else None


@functools.lru_cache(maxsize=16)
def _lines(module: GraphModule) -> dict[str, str | None]:
    return {node.name: line_of(node) for node in module.graph.nodes}


def _identity(inputs: Sequence[Any], sizes: list[int], seeds: list[Any], key: str) -> str:
    """Of those of its ops that have one: the graph's key knows them by name."""
    graph = GRAPHS[key]
    bound = graph.symbols.bind(sizes, [x.shape for x in inputs])
    return " ".join(op_digests(graph.module, bound))


def _lower(
    inputs: Sequence[jax.Array], sizes: Sequence[int], seeds: Sequence[Any], key: str
) -> list[jax.Array]:
    return _evaluate(GRAPHS[key], inputs, sizes, seeds)


def _fraction(node: Node, sizes: Sizes) -> Any:
    """Value of a backward graph's input that forward worked out from sizes, such as 0.1 / n."""
    value = node.meta.get("val")
    is_known = isinstance(value, torch.SymFloat) and sizes.knows(value)
    return sizes.value(value) if is_known else None


def _evaluate(
    graph: Graph, inputs: Sequence[jax.Array], sizes: Sequence[int], seeds: Sequence[Any]
) -> list[jax.Array]:
    given = {**dict(zip(graph.tensors, inputs)), **dict(zip(graph.sizes, sizes))}
    bound = graph.symbols.bind(sizes, [x.shape for x in inputs])
    places = graph.module.graph.find_nodes(op="placeholder")
    arguments = [given.get(i, _fraction(n, bound)) for i, n in enumerate(places)]
    if graph.bounded is not None:
        results = graph.bounded.results(arguments, bound)
        return [r for r, is_made in zip(results, graph.made, strict=True) if is_made]
    same = graph.same if is_tracing() else {}
    values = evaluate(graph.module, arguments, bound, Words(seeds), same)
    return [values[r] for r, is_made in zip(graph.results, graph.made) if is_made]
