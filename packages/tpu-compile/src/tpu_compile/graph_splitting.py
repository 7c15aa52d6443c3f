"""Graph splitting around ops with data-dependent result sizes, and those that no program can hold.

``nonzero`` and the like are ops of eager between the parts, which look at values on the host. So
are ops without a lowering and those of tensors on the CPU. The
loop whose rounds are kept for backward is a program of its own, with room for a number of rounds:
how many there were is looked at afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten

from tpu_compile import numbers, random_states
from tpu_compile.control_flow import STACKS
from tpu_compile.evaluate import is_arithmetic
from tpu_compile.fx_utils import has_random_op, outputs, part_of, subgraph
from tpu_compile.rng import STATE, drawing
from tpu_compile.sizes import Sizes
from tpu_compile.unbacked import CHECK, SizeAssertion, check_of

Compile = Callable[[GraphModule], Callable[..., Any]]

_FIRST_ROUNDS = 16


@dataclass(slots=True)
class _Part:
    """A part of a graph that is compiled.

    Attributes:
        run: Computes ``results`` from ``inputs``.
    """

    run: Callable[..., Any]
    inputs: list[Node]
    results: list[Node]


@dataclass(slots=True)
class _Loop:
    """A loop that keeps its rounds.

    Attributes:
        node: Calls the loop.
        inputs: The tensors that it takes.
        rounds: Number of rounds that its program has room for.
        programs: By their number.
    """

    node: Node
    inputs: list[Node]
    compile: Compile
    rounds: int = _FIRST_ROUNDS
    programs: dict[int, Callable[..., Any]] = field(default_factory=dict)

    def run(self, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Values kept of each iteration, stacked."""
        while True:
            if self.rounds not in self.programs:
                self.programs[self.rounds] = self.compile(_loop_of(self, self.rounds))
            *kept, count = self.programs[self.rounds](*arguments)
            rounds = int(count.item())
            if rounds <= self.rounds:
                return tuple(k[:rounds] for k in kept)
            self.rounds = 1 << (rounds - 1).bit_length()


def _loop_of(loop: _Loop, rounds: int) -> GraphModule:
    """A graph of the loop alone, which keeps that many rounds and counts them all."""
    node = loop.node
    owner = node.graph.owning_module
    fake = detect_fake_mode([n.meta["val"] for n in loop.inputs])
    assert owner is not None and fake is not None
    graph = Graph()
    copies: dict[Node, Node] = {}
    for source in loop.inputs:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    for source in node.all_input_nodes:
        if source not in copies:
            copies[source] = graph.node_copy(source)
    call = graph.node_copy(node, copies.__getitem__)
    results = []
    with fake:
        shapes = [(v, (rounds, *v.shape[1:])) for v in node.meta["val"]]
        kept = [v.new_empty(shape) for v, shape in shapes]
        kept.append(torch.empty((), dtype=torch.int64, device="tpu"))
    call.meta = {**node.meta, "val": tuple(kept)}
    for i, value in enumerate(kept):
        results.append(graph.call_function(operator.getitem, (call, i)))
        results[-1].meta["val"] = value
    graph.output(tuple(results))
    return GraphModule(owner, graph)


@dataclass(slots=True)
class Parts:
    """A graph that runs in parts; call it with the graph's inputs.

    Attributes:
        module: The graph.
        steps: Parts, ops between them, and checks, in order.
        apart: The ops between them.
        inputs: Nodes of the graph's inputs.
        results: Outputs: nodes, numbers and None.
        sized: Whether an input has symbolic sizes, or is one.
        sizing: The ops between them whose results have symbolic sizes.
    """

    module: GraphModule
    steps: list[Any]
    apart: AbstractSet[Node]
    inputs: list[Node] = field(init=False)
    results: list[Any] = field(init=False)
    sized: bool = field(init=False)
    sizing: AbstractSet[Node] = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = self.module.graph.find_nodes(op="placeholder")
        self.results = outputs(self.module)
        self.sized = any(map(_has_symbols, self.inputs))
        self.sizing = set(filter(_has_symbols, self.apart))

    def __call__(self, *arguments: Any) -> list[Any]:
        """Outputs of the graph."""
        values: dict[Node, Any] = dict(zip(self.inputs, arguments, strict=True))
        sizes = Sizes({})
        if self.sized:
            sizes = sizes.inside([n.meta.get("val") for n in self.inputs], arguments)

        def value(node: Any) -> Any:
            if not isinstance(node, Node) or node in values:
                return values.get(node, node)
            found = subgraph(node)
            if found is None and node.op == "get_attr":
                return getattr(self.module, str(node.target))
            return found if found is not None else sizes.value(node.meta["val"])

        for step in self.steps:
            if isinstance(step, SizeAssertion):
                step.verify(sizes)
                continue
            if isinstance(step, _Part):
                made = step.run(*map(value, step.inputs))
                values.update(zip(step.results, made, strict=True))
                continue
            if isinstance(step, _Loop):
                node, result = step.node, step.run(list(map(value, step.inputs)))
            else:
                node = step
                target: Any = node.target
                result = target(*map_arg(node.args, value), **map_arg(node.kwargs, value))
            values[node] = result
            if node in self.sizing:
                metas, found = tree_flatten(node.meta["val"])[0], tree_flatten(result)[0]
                pairs = zip(metas, found, strict=True)
                sizes = sizes.inside(*zip(*((m, v) for m, v in pairs if v is not None)))
        return [value(r) for r in self.results]


def _has_symbols(node: Node) -> bool:
    return any(map(numbers.symbols, tree_flatten(node.meta.get("val"))[0]))


def in_parts(
    module: GraphModule,
    known: AbstractSet[Any],
    faulty: AbstractSet[Node],
    compile: Compile,
) -> Parts | None:
    """The graph in parts; None where it is not such a graph.

    Args:
        module: A graph of functional overloads.
        known: The symbols that its inputs give.
        faulty: Nodes that no program can hold.
        compile: Compiles a graph.
    """
    sized = _breaks(module, known)
    breaks = sized | _apart(module, faulty)
    nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    has_checks = any(n.target is CHECK for n in nodes)
    if not (breaks or has_checks) or not _can_be_parted(module, nodes, sized):
        return None
    level = _levels(module, breaks, known)
    steps: list[Any] = []
    parts: list[tuple[int, list[Node]]] = []
    for at in range(max(level.values(), default=0) + 1):
        here = [n for n in nodes if level.get(n) == at]
        computed = [n for n in here if n not in breaks and not _is_of_host(n)]
        if computed:
            parts.append((len(steps), computed))
            steps.append(None)
        for node in here:
            if node.target is CHECK:
                check = check_of(node)
                steps += [check] if check else []
            elif node in breaks and node.target is STACKS:
                tensors = [n for n in node.all_input_nodes if n.op != "get_attr"]
                steps.append(_Loop(node, tensors, compile))
            elif node in breaks:
                steps.append(node)
    for position, computed in parts:
        steps[position] = _part(module, computed, compile)
    if not _keeps_order_of_draws(module, steps, dict(parts)):
        return None
    return Parts(module, steps, breaks)


def _keeps_order_of_draws(
    module: GraphModule, steps: Sequence[Any], parts: Mapping[int, Sequence[Node]]
) -> bool:
    """Return whether random ops draw in eager's order."""
    drawn = set(drawing(module)) | set(filter(has_random_op, module.graph.nodes))
    order: list[Node] = []
    for i, step in enumerate(steps):
        order += [n for n in parts.get(i, [step]) if isinstance(n, Node) and n in drawn]
    return order == [n for n in module.graph.nodes if n in set(order)]


def _apart(module: GraphModule, faulty: AbstractSet[Node]) -> set[Node]:
    """The calls that no program can hold, and those that meet their tensors on the CPU.

    A tensor on the CPU is neither input nor output of a part.
    """
    calls = [n for n in module.graph.nodes if n.op == "call_function" and not _is_of_host(n)]
    found = {n for n in calls if n in faulty}
    outside = {n for n in module.graph.nodes if n.op == "placeholder" and _is_on_cpu(n)}
    before = -1
    while before != len(found):
        before = len(found)
        for node in calls:
            if _is_element(node):
                meets = node.args[0] in found
            else:
                meets = any(n in outside for n in node.all_input_nodes) or (
                    _is_on_cpu(node) and any(u in found or u.op == "output" for u in node.users)
                )
            if meets:
                found.add(node)
            if node in found and _is_on_cpu(node):
                outside.add(node)
    return found


def _is_on_cpu(node: Node) -> bool:
    values = tree_flatten(node.meta.get("val"))[0]
    return any(isinstance(v, torch.Tensor) and v.device.type != "tpu" for v in values)


def _breaks(module: GraphModule, known: AbstractSet[Any]) -> set[Node]:
    """The nodes that make sizes, and the elements of their results."""
    found: set[Node] = set()
    seen = set(known)
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        value = node.meta.get("val")
        made = set().union(*map(numbers.symbols, tree_flatten(value)[0]))
        makes = bool(made - seen) and (not is_arithmetic(value) or node.target is numbers.ITEM)
        if makes or (_is_element(node) and node.args[0] in found):
            found.add(node)
            seen |= made
    return found


def _is_element(node: Node) -> bool:
    return node.target is operator.getitem


def _is_of_host(node: Node) -> bool:
    """Return whether a node is a number that the host works out, or a check of one."""
    return node.target is CHECK or is_arithmetic(node.meta.get("val"))


def _can_be_parted(module: GraphModule, nodes: Sequence[Node], breaks: AbstractSet[Node]) -> bool:
    if any(random_states.is_state(n) or STATE in n.meta for n in module.graph.nodes):
        return False
    for node in nodes:
        value = node.meta.get("val")
        if random_states.drawn_op(node) is not None or isinstance(value, torch.SymFloat):
            return False
        if node in breaks and isinstance(node.target, torch._ops.HigherOrderOperator):
            if node.target is not STACKS:
                return False
        if node.target is STACKS and any(is_arithmetic(n.meta.get("val")) for n in _given(node)):
            return False
    return True


def _given(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if n.op != "get_attr"]


def _levels(
    module: GraphModule, breaks: AbstractSet[Node], known: AbstractSet[Any]
) -> dict[Node, int]:
    """Number of splitting ops that a node depends on."""
    level: dict[Node, int] = {}
    of_symbol: dict[Any, int] = dict.fromkeys(known, 0)
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        values = tree_flatten(node.meta.get("val"))[0]
        if node.target is CHECK:
            values = [n.meta["val"] for n in node.all_input_nodes]
        wanted = set().union(*map(numbers.symbols, values))
        before = [of_symbol[s] for s in wanted if s in of_symbol]
        for source in node.all_input_nodes:
            # A number follows from the sizes that are known, whatever op made it.
            if source in level and not _is_of_host(source):
                before.append(level[source] + (source in breaks and not _is_element(node)))
        level[node] = max(before, default=0)
        if node in breaks:
            for symbol in wanted:
                of_symbol.setdefault(symbol, level[node] + 1)
    return level


def _part(module: GraphModule, computed: Sequence[Node], compile: Compile) -> _Part:
    inside = set(computed)
    inputs: dict[Node, None] = {}
    copied: dict[Node, None] = {}
    for node in computed:
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                copied[source] = None
            elif source not in inside:
                inputs[source] = None
        copied[node] = None
    results = [n for n in computed if any(user not in inside for user in n.users)]
    given = list(inputs)
    return _Part(compile(part_of(module, list(copied), given, results)), given, results)
