"""Outputs of a graph that share memory: one result of the program, and views of it.

In eager ``y, y.view(-1)`` share their memory, and a tensor that forward keeps for backward is often
an input. A program has a buffer of its own for each of its results, so here it returns each storage
once, no input at all, and what was asked for is put together from that. A view of an input is made
of the input: AOTAutograd reads from it where it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from tpu_compile.fx_utils import is_tensor
from tpu_compile.jagged import plain_size
from tpu_compile.numbers import are_known as is_known_number
from tpu_compile.sizes import Sizes, is_symbol

Boxed = Callable[[list[Any]], Sequence[Any]]
"""A function of a list that it may empty, as AOTAutograd calls what compiles give."""


@dataclass(frozen=True, slots=True)
class _Input:
    """An output that is an input."""

    index: int


@dataclass(frozen=True, slots=True)
class _Result:
    """An output that the program returns."""

    index: int


@dataclass(frozen=True, slots=True)
class _InputView:
    """An output that shares the memory of an input; numbers may be symbolic."""

    of: _Input
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any  # from where the input begins


@dataclass(frozen=True, slots=True)
class _View:
    """An output that shares the memory of a result; sizes are numbers or results."""

    of: _Result
    size: tuple[int | _Result, ...]
    stride: tuple[int | _Result, ...]
    offset: int | _Result


def compile_apart(
    module: GraphModule, visible: int, compile: Callable[[GraphModule], Boxed]
) -> Boxed:
    """Compile a graph so that outputs share memory where they do in eager.

    Args:
        module: A graph of functional overloads; it is left as it is.
        visible: Number of its first outputs that the user may see, and so write. The others keep
            memory of their own: their values must not change with what is written.
        compile: Compiles a graph whose results are all apart.
    """
    apart, outputs = _apart(module, visible)
    if apart is module:
        return compile(module)
    compiled = compile(apart)
    views = [o for o in outputs if isinstance(o, _InputView)]
    kept = sorted({o.index for o in outputs if isinstance(o, _Input)} | {v.of.index for v in views})
    metas = [n.meta.get("val") for n in module.graph.find_nodes(op="placeholder")]
    is_dynamic = any(isinstance(n, torch.SymInt) for v in views for n in _numbers(v))

    def run(arguments: list[Any]) -> list[Any]:
        inputs = {i: arguments[i] for i in kept}
        sizes = Sizes(_symbols(metas, arguments) if is_dynamic else {})
        made = compiled(arguments)
        # Views that autograd follows would forbid to write them outside of the function.
        with torch._C._AutoDispatchBelowAutograd():
            return [_put_together(o, inputs, made, sizes) for o in outputs]

    vars(run)["_boxed_call"] = True
    return run


def _numbers(view: _InputView) -> tuple[Any, ...]:
    return (*view.size, *view.stride, view.offset)


def _symbols(metas: Sequence[Any], arguments: Sequence[Any]) -> dict[Any, int]:
    """Values of the symbols in the geometry of a graph's inputs."""
    found: dict[Any, int] = {}
    for meta, argument in zip(metas, arguments):
        pairs = [(meta, argument)]
        if isinstance(meta, torch.Tensor):
            pairs = [*zip(meta.shape, argument.shape), *zip(meta.stride(), argument.stride())]
            pairs.append((meta.storage_offset(), argument.storage_offset()))
        found.update((m.node.expr, plain_size(a)) for m, a in pairs if is_symbol(m))
    return found


def _put_together(output: Any, inputs: dict[int, Any], made: Sequence[Any], sizes: Sizes) -> Any:
    if isinstance(output, _Result):
        return made[output.index]
    if isinstance(output, _Input):
        return inputs[output.index]
    if isinstance(output, _InputView):
        base = inputs[output.of.index]
        offset = base.storage_offset() + sizes.value(output.offset)
        return torch.as_strided(base, sizes.all(output.size), sizes.all(output.stride), offset)
    size, stride, (offset,) = (
        [made[n.index] if isinstance(n, _Result) else n for n in numbers]
        for numbers in (output.size, output.stride, (output.offset,))
    )
    return torch.as_strided(made[output.of.index], size, stride, offset)


def _apart(module: GraphModule, visible: int) -> tuple[GraphModule, list[Any]]:
    """A graph whose tensor outputs share nothing, and how its results make the module's outputs."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    wanted = graph.graph_copy(module.graph, copies)
    wanted = list(wanted) if isinstance(wanted, (tuple, list)) else [wanted]
    inputs = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
    roots = _roots(graph, wanted[:visible])
    views = _views_of_inputs(inputs, wanted[:visible])

    results: list[Any] = []
    places: dict[Node, _Result] = {}

    def place(node: Any) -> _Result:
        if isinstance(node, Node) and node in places:
            return places[node]
        results.append(node)
        made = _Result(len(results) - 1)
        if isinstance(node, Node):
            places[node] = made
        return made

    outputs: list[Any] = []
    for i, node in enumerate(wanted):
        if not isinstance(node, Node):
            outputs.append(place(node))
        elif node in inputs and is_tensor(node):
            outputs.append(_Input(inputs[node]))
        elif i < visible and node in views:
            outputs.append(views[node])
        elif i < visible and roots.get(node, node) is not node:
            outputs.append(_view(graph, node, place(roots[node]), place))
        else:
            outputs.append(place(node))
    if outputs == [_Result(i) for i in range(len(wanted))]:
        return module, []
    graph.output(tuple(results))
    return GraphModule(module, graph), outputs


def _roots(graph: Graph, outputs: list[Any]) -> dict[Node, Node]:
    """For each output whose memory another one shares, or whose elements share a place, as those of
    an expanded tensor do, the node that made that memory.
    """
    sharing: dict[int, set[Node]] = {}
    for node in outputs:
        if isinstance(node, Node) and is_tensor(node):
            sharing.setdefault(_storage(node), set()).add(node)
    makers: dict[int, Node] = {}
    for node in graph.nodes:
        if is_tensor(node):
            makers.setdefault(_storage(node), node)
    return {
        node: makers[storage]
        for storage, nodes in sharing.items()
        if makers[storage].op == "call_function"
        for node in nodes
        if len(nodes) > 1 or _overlaps(node.meta["val"])
        if _is_strided_view(node.meta["val"], makers[storage].meta["val"])
    }


def _overlaps(value: torch.Tensor) -> bool:
    """Return whether elements share a place, by the sizes that the graph was traced with."""

    def known(n: Any) -> int:
        hint = n.node.hint if isinstance(n, torch.SymInt) else n
        return 2 if hint is None else int(hint)

    end = 1
    dims = [(known(t), known(n)) for n, t in zip(value.shape, value.stride())]
    for stride, size in sorted(dims):
        if size > 1 and stride < end:
            return True
        end += (size - 1) * stride if size else 0
    return False


def _views_of_inputs(inputs: dict[Node, int], outputs: list[Any]) -> dict[Node, _InputView]:
    """The outputs that are views of inputs, where they begin in a place that the inputs tell."""
    owners: dict[int, Node] = {}
    for node in inputs:
        if is_tensor(node):
            owners.setdefault(_storage(node), node)
    known: set[Any] = set()
    for node in inputs:
        value = node.meta.get("val")
        numbers: list[Any] = [value]
        if isinstance(value, torch.Tensor):
            numbers = [*value.shape, *value.stride(), value.storage_offset()]
        known.update(n.node.expr for n in numbers if is_symbol(n))
    found = {}
    for node in outputs:
        owner = owners.get(_storage(node)) if isinstance(node, Node) and is_tensor(node) else None
        if owner is None or node is owner:
            continue
        value, base = node.meta["val"], owner.meta["val"]
        if not _is_strided_view(value, base):
            continue
        offset = value.storage_offset() - base.storage_offset()
        view = _InputView(_Input(inputs[owner]), tuple(value.size()), tuple(value.stride()), offset)
        if all(is_known_number(n, known) for n in _numbers(view)):
            found[node] = view
    return found


def _storage(node: Node) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)


def _is_strided_view(value: torch.Tensor, of: torch.Tensor) -> bool:
    """Return whether the values are those of ``of``, read at other places."""
    return (value.dtype, value.is_conj(), value.is_neg()) == (of.dtype, of.is_conj(), of.is_neg())


def _view(graph: Graph, node: Node, of: _Result, place: Callable[[Any], _Result]) -> _View:
    """View of ``of`` with the geometry of ``node``; a symbolic size becomes a result of the
    graph.
    """
    value: torch.Tensor = node.meta["val"]
    ops = torch.ops.aten

    def number(n: Any, op: Any, *arguments: Any) -> int | _Result:
        if not isinstance(n, torch.SymInt):
            return int(n)
        size = graph.call_function(op, (node, *arguments))
        size.meta["val"] = n
        return place(size)

    return _View(
        of,
        tuple(number(n, ops.sym_size.int, i) for i, n in enumerate(value.size())),
        tuple(number(n, ops.sym_stride.int, i) for i, n in enumerate(value.stride())),
        number(value.storage_offset(), ops.sym_storage_offset.default),
    )
