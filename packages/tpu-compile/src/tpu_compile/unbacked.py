"""Graphs with sizes that follow from values: ``nonzero``, boolean masks, ``item``.

Where the program bounds such a size, by ``torch._check(n <= 64)``, the graph becomes one program
whose arrays have the bound as their size. What lies past the actual size, which is known at run
time alone, is kept from the results by the rules of `tpu_core.padding`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node

from tpu_compile import numbers
from tpu_compile.evaluate import call
from tpu_compile.fx_utils import is_tensor, line_of, outputs, part_of, subgraphs
from tpu_compile.rng import Words, drawing
from tpu_compile.sizes import Sizes, is_symbol
from tpu_core.extend import run_with_dynamic_counts

_aten = torch.ops.aten
_NONZERO = _aten.nonzero.default
CHECK = _aten._assert_scalar.default

FILL = 0  # the index past the last element that counts: any that is valid


@dataclass(frozen=True, slots=True)
class SizeAssertion:
    """A condition on sizes that the program computes.

    Attributes:
        condition: A symbolic truth.
        message: Text of PyTorch's error where it does not hold.
        line: The user's line.
    """

    condition: torch.SymBool
    message: str
    line: str | None

    def verify(self, sizes: Sizes) -> None:
        """Raise what the check says if it does not hold.

        Raises:
            RuntimeError: As PyTorch's own, with the sizes and the user's line.
        """
        if not sizes.value(self.condition):
            given = ", ".join(f"{s} is {n}" for s, n in sizes.of(self.condition).items())
            at = f", at {self.line}" if self.line else ""
            raise RuntimeError(f"{self.message}: {given}{at}")


@dataclass(frozen=True, slots=True)
class Bounded:
    """A graph in two parts: up to where sizes are computed, and from there on.

    Attributes:
        module: The whole, without checks; behind its results come the sizes, if there are checks.
        checks: Conditions on the sizes.
        sizes: The sizes' symbols.
        limits: The largest value that the program allows of each.
        makers: The nodes whose results have the sizes.
        first: Computes ``passed``.
        second: From ``passed`` and what the makers give, the results.
        passed: Nodes of the module.
    """

    module: GraphModule
    checks: list[SizeAssertion]
    sizes: list[torch.SymInt]
    limits: list[int]
    makers: list[Node]
    first: GraphModule
    second: GraphModule
    passed: list[Node]

    def results(self, arguments: Sequence[Any], bound: Sizes) -> list[Any]:
        """Results of ``module``.

        Args:
            arguments: JAX values of its inputs, and numbers for sizes.
            bound: Values of the symbols that the inputs give.

        Raises:
            NotPaddableError: An op of the second part cannot run on padded arrays.
        """
        draws = Words(())
        found = call(self.first, arguments, bound, draws)
        values = dict(zip(self.passed, found))
        counts, limits, made, found_sizes = [], [], [], []
        for maker, limit in zip(self.makers, self.limits):
            source: Any = maker.args[0]
            x = values[source]
            if maker.target is _NONZERO:
                limit = min(limit, math.prod(x.shape))
                places = jnp.nonzero(x, size=limit, fill_value=FILL)
                made.append((jnp.stack(places, 1).astype(np.int64), True))
                size = jnp.count_nonzero(x)
            else:
                made.append((jnp.zeros(()), False))
                size = jnp.reshape(x, ())
            found_sizes.append(size.astype(np.int64))
            counts.append(jnp.clip(size, 0, limit).astype(np.int32))
            limits.append(limit)
        arrays = [(v, (None,) * v.ndim) for v in found if hasattr(v, "ndim")]
        arrays += [(a, (i, None)) for i, (a, is_array) in enumerate(made) if is_array]

        def trace(sample: Sequence[int]) -> Any:
            own = [
                jax.ShapeDtypeStruct((n, a.shape[1]), a.dtype) if is_array else n
                for n, (a, is_array) in zip(sample, made)
            ]
            given = [*found, *own]
            inputs = [n.meta["val"] for n in self.second.graph.find_nodes(op="placeholder")]
            inside = bound.inside(inputs, given)
            shapes = [x for x in given if hasattr(x, "ndim")]

            def function(*xs: jax.Array) -> list[jax.Array]:
                rest = iter(xs)
                whole = [next(rest) if hasattr(x, "ndim") else x for x in given]
                results = call(self.second, whole, inside, draws)
                return [jnp.asarray(r) for r in results if hasattr(r, "ndim")]

            return jax.make_jaxpr(function)(*shapes)

        late = iter(run_with_dynamic_counts(trace, arrays, counts, limits))
        exprs = [size.node.expr for size in self.sizes]
        results: list[Any] = []
        for result in outputs(self.module):
            value: Any = result.meta["val"] if isinstance(result, Node) else None
            if isinstance(value, torch.Tensor):
                results.append(next(late))
            elif is_symbol(value) and value.node.expr in exprs:
                results.append(found_sizes[exprs.index(value.node.expr)])
            else:
                results.append(None)
        return results

    def verify(self, sizes: Sequence[int]) -> None:
        """Raise what a check that does not hold says.

        Raises:
            RuntimeError: As PyTorch's own, with the sizes and the user's line.
        """
        values = Sizes({s.node.expr: n for s, n in zip(self.sizes, sizes, strict=True)})
        for check in self.checks:
            check.verify(values)


def bounded(module: GraphModule, known: AbstractSet[Any]) -> Bounded | None:
    """The graph in parts that run on bounded sizes; None where it is not such a graph.

    Args:
        module: A graph of functional overloads.
        known: The symbols that its inputs give.
    """
    whole = _copy(module)
    checks = _take_checks(whole)
    _expand_masks(whole, known)
    nodes = list(whole.graph.nodes)
    makers = [n for n in nodes if n.target is _NONZERO or (n.target is numbers.ITEM and _is_int(n))]
    makers = [m for m in makers if not numbers.are_known(_size_of(m), known)]
    sizes = [_size_of(m) for m in makers]
    if not makers or drawing(whole) or not all(map(is_symbol, sizes)):
        return None
    limits = [_limit(size) for size in sizes]
    explicit = {s for c in checks if c.line for s in numbers.symbols(c.condition)}
    if None in limits or not all(s.node.expr in explicit for s in sizes):
        return None
    late: set[Node] = set()
    for node in nodes:
        if node in makers or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    if any(i in late for m in makers for i in m.all_input_nodes):
        return None
    computed = set().union(*map(numbers.symbols, sizes))
    if any(not numbers.symbols(c.condition) <= computed for c in checks):
        return None
    if any(
        isinstance(r, Node) and numbers.symbols(r.meta["val"]) & computed for r in outputs(whole)
    ):
        return None
    if any(subgraphs(n) for n in late):
        return None
    passed = [n for n in nodes if n not in late and n.op != "output" and _is_passed(n, late)]
    results = [r for r in outputs(whole) if isinstance(r, Node) and is_tensor(r)]
    early = [n for n in nodes if n not in late and n.op != "output"]
    rest = [n for n in nodes if n in late and n.op != "output"]
    checks = [c for c in checks if not _follows(c, makers, sizes)]
    if checks:
        _return_sizes(whole, makers)
    return Bounded(
        whole,
        checks,
        sizes,
        [limit for limit in limits if limit is not None],
        makers,
        part_of(whole, early, [], passed),
        part_of(whole, rest, [*passed, *makers], results),
        passed,
    )


def _copy(module: GraphModule) -> GraphModule:
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return GraphModule(module, graph)


def _size_of(maker: Node) -> Any:
    """The size that a node makes."""
    value = maker.meta["val"]
    return value.shape[0] if isinstance(value, torch.Tensor) else value


def _is_int(node: Node) -> bool:
    return isinstance(node.meta["val"], torch.SymInt)


def _limit(size: torch.SymInt) -> int | None:
    upper = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(upper) if upper.is_Integer and upper < 2**31 else None


def check_of(node: Node) -> SizeAssertion | None:
    """Condition that a node checks; None where that is a constant."""
    condition, message = node.args[:2]
    if isinstance(condition, Node) and isinstance(condition.meta["val"], torch.SymBool):
        return SizeAssertion(condition.meta["val"], str(message), line_of(condition))
    return None


def _take_checks(module: GraphModule) -> list[SizeAssertion]:
    """Take the checks of sizes out of a graph."""
    found = []
    for node in list(module.graph.nodes):
        if node.target is CHECK:
            check = check_of(node)
            found += [check] if check else []
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    return found


def _follows(check: SizeAssertion, makers: Sequence[Node], sizes: Sequence[torch.SymInt]) -> bool:
    """Return whether a check holds of whatever number of elements there are."""
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    ranges = {}
    for maker, size in zip(makers, sizes, strict=True):
        source: Any = maker.args[0]
        count = source.meta["val"].numel()
        if maker.target is _NONZERO and isinstance(count, int):
            ranges[size.node.expr] = ValueRanges(0, count)
    if not numbers.symbols(check.condition) <= ranges.keys():
        return False
    truth = bound_sympy(check.condition.node.expr, ranges)
    return bool(truth.is_singleton() and truth.lower)


def _expand_masks(module: GraphModule, known: AbstractSet[Any]) -> None:
    """Put the indices of true elements in the place of masks, ``x[mask]``."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=_aten.index.Tensor):
        x, indices = node.args
        masks = [i for i in indices if i is not None and i.meta["val"].dtype is torch.bool]
        if len(masks) != 1 or numbers.are_known(node.meta["val"], known):
            continue
        (mask,) = masks
        fake = detect_fake_mode(mask.meta["val"])
        position = list(indices).index(mask)
        size = node.meta["val"].shape[position]
        if fake is None or not is_symbol(size):
            continue
        with graph.inserting_before(node), fake:
            value: torch.Tensor = mask.meta["val"]
            places = graph.call_function(_NONZERO, (mask,))
            made = value.new_empty((size, value.dim()), dtype=torch.int64)
            places.meta = {**node.meta, "val": made}
            columns = []
            for axis in range(value.dim()):
                column = graph.call_function(_aten.select.int, (places, 1, axis))
                column.meta = {**node.meta, "val": made.select(1, axis)}
                columns.append(column)
        node.args = (x, [*indices[:position], *columns, *indices[position + 1 :]])


def _return_sizes(module: GraphModule, makers: Sequence[Node]) -> None:
    """Return the sizes behind the results."""
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    returned = []
    for maker in makers:
        size = maker
        if maker.target is _NONZERO:
            with graph.inserting_before(output):
                size = graph.call_function(_aten.sym_size.int, (maker, 0))
            size.meta["val"] = _size_of(maker)
        returned.append(size)
    output.args = ((*output.args[0], *returned),)


def _is_passed(node: Node, late: AbstractSet[Node]) -> bool:
    return any(user in late or user.op == "output" for user in node.users)
