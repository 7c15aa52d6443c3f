"""Signatures of a family's ops as functions of its sizes, each from one trace.

An op whose lowering can be traced with JAX's symbolic dims need not be traced at each size: the
integers in the trace are expressions, computed from the sizes, and what the lowering compared is
known. The others are traced at each size (`padding/segment_signature.py`).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpu_core import interruptible
from tpu_core.compiler.segment import Node, Segment
from tpu_core.lowering.tables import Table
from tpu_core.padding.fit import Fit
from tpu_core.padding.jaxpr_signature import Signature
from tpu_core.padding.recording import (
    form_of_node,
    places_of_nodes,
    shapes_of_slots,
    with_integers,
)
from tpu_core.padding.segment_signature import Lifted, lifted_numbers, trace
from tpu_core.padding.sizes import Size, identical
from tpu_core.pjrt import symbolic_dims
from tpu_core.recorder.compute import LoweringCompute
from tpu_core.recorder.plan import NodePlan

logger = logging.getLogger("tpu_core")

# Symbols beyond which no relation of three of them is looked for.
_MOST_RELATED = 32


@dataclass(slots=True)
class _Traced:
    """One op's trace: its signature with indices of expressions for the numbers that vary."""

    form: str
    dtypes: tuple[str, ...]
    numbers: list[float]
    varying: list[tuple[int, int]]
    conditions: list[tuple[int, str, bool]]
    results: list[list[Size]]
    tables: list[Table]  # computed with symbolic dims, so that they follow from none
    # Of the last sizes: the signature, and the plans by id that are instances of the op.
    sizes: tuple[int, ...] | None = None
    signature: Signature | None = None
    instances: dict[int, NodePlan] = field(default_factory=dict)

    def start(self, values: Sequence[int]) -> None:
        """Forget what is known of other sizes."""
        if self.sizes != tuple(values):
            self.sizes, self.instances = tuple(values), {}
            if self.varying:
                self.signature = None

    def holds(self, values: Sequence[int], expressions: _Expressions) -> bool:
        """Return whether all comparisons turn out as they did."""
        return all(
            symbolic_dims.compared(expressions.value(index, values), kind) == holds
            for index, kind, holds in self.conditions
        )

    def at(self, values: Sequence[int], expressions: _Expressions) -> Signature:
        """The signature at some sizes: one object for all nodes that share the trace."""
        self.start(values)
        if self.signature is not None:
            return self.signature
        numbers = self.numbers.copy()
        for place, index in self.varying:
            number = expressions.value(index, values)
            dtype = self.dtypes[place]
            numbers[place] = number if dtype == "int" else np.asarray(number).astype(dtype).item()
        self.signature = (self.form, self.dtypes, tuple(numbers))
        return self.signature


class _Expressions:
    """Different expressions of a family, each worked out once for some sizes."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._expressions: list[Any] = []
        self._values: dict[int, int] = {}
        self._sizes: tuple[int, ...] = ()

    def add(self, expression: Any) -> int:
        """Index of an expression; equal ones share it."""
        index = self._index.setdefault(str(expression), len(self._expressions))
        if index == len(self._expressions):
            self._expressions.append(expression)
        return index

    def value(self, index: int, values: Sequence[int]) -> int:
        if self._sizes != tuple(values):
            self._sizes, self._values = tuple(values), {}
        found = self._values.get(index)
        if found is None:
            found = self._values[index] = symbolic_dims.value(self._expressions[index], values)
        return found


class SymbolicSignatures:
    """Signatures of the ops of a family.

    Args:
        segments: Its recordings.
        signatures: Of each recording those of its nodes that have a plan.
        fit: The relations of its sizes.

    Example:
        >>> SymbolicSignatures(segments, signatures, fit).at(3, node, [17, 40])
        ('5e1f...', ('int',), (680,))
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        signatures: Sequence[Sequence[Signature]],
        fit: Fit,
    ) -> None:
        self._segments = segments
        self._signatures = signatures
        self._fit = fit
        self._rows = list(fit.values)
        self._relate()
        self._places = places_of_nodes(segments[0])
        self._shapes = shapes_of_slots(segments[0], fit.sizes)

    def _relate(self) -> None:
        self._expressions = _Expressions()
        self._traced: dict[int, _Traced | None] = {}
        # Layers repeat: by all that a trace depends on.
        self._shared: dict[Any, _Traced | None] = {}
        offsets = [self._fit.sizes[position].offset for position in self._fit.symbols]
        self._related = _relations(self._rows, offsets)

    def at(self, index: int, node: Node, values: Sequence[int]) -> Signature | None:
        """The signature of a member's node; None where it is to be traced.

        Args:
            index: Position of the node in its segment.
            node: The node, whose integers are what the fit says.
            values: The sizes.
        """
        traced = self._holding(index, node, values)
        return None if traced is None else traced.at(values, self._expressions)

    def tables(self, index: int, node: Node, values: Sequence[int]) -> list[Table] | None:
        """The tables of a member's node; None where it is to be traced. Arguments as of `at`."""
        traced = self._holding(index, node, values)
        return None if traced is None else traced.tables

    def _holding(self, index: int, node: Node, values: Sequence[int]) -> _Traced | None:
        """The trace of an op, where it is that of a member's node."""
        if any(values[symbol] != r.of(values) for symbol, r in self._related.items()):
            self._rows.append(list(values))
            self._relate()
        if index not in self._traced:
            self._traced[index] = self._of(index)
        traced, plan = self._traced[index], node.plan
        assert plan is not None
        if traced is None:
            return None
        traced.start(values)
        if id(plan) not in traced.instances:  # layers that repeat share plans, and a trace
            if not traced.holds(values, self._expressions):
                return None
            if not self._is_instance(plan, index, traced, values):
                return None
            traced.instances[id(plan)] = plan
        return traced

    def _is_instance(
        self, plan: NodePlan, index: int, traced: _Traced, values: Sequence[int]
    ) -> bool:
        """Return whether a plan is the traced one where its integers do not say so."""
        first = self._segments[0].nodes[index].plan
        assert first is not None
        ours, theirs = plan.compute, first.compute
        return (
            isinstance(ours, LoweringCompute)
            and isinstance(theirs, LoweringCompute)
            and ours.op == theirs.op
            and ours.contiguous == theirs.contiguous
            and [a.starts() for a in (*plan.reads, *plan.writes)]
            == [a.starts() for a in (*first.reads, *first.writes)]
            and [(list(a.shape), a.dtype) for a in _avals(ours.out)]
            == [
                ([size.value(values) for size in shape], a.dtype)
                for shape, a in zip(traced.results, _avals(theirs.out))
            ]
        )

    def _of(self, index: int) -> _Traced | None:
        """The trace of an op, where it has the recordings' signatures at their sizes."""
        nodes = [s.nodes[index] for s in self._segments]
        plans = [n.plan for n in nodes if n.plan is not None]
        if not all(
            isinstance(p.compute, LoweringCompute) and p.compute.takes_symbolic_dims for p in plans
        ):
            return None
        results = self._results(plans)
        if results is None:
            return None
        sizes = [[self._fit.sizes[i] for i in places] for places in self._places[index]]
        slots = self._segments[0].slots
        operands = [(self._shapes[i], slots[i].dtype) for i in nodes[0].operands]
        lifted = lifted_numbers(self._segments[0], index)
        compute: Any = plans[0].compute
        starts = [tuple(a.starts()) for a in (*plans[0].reads, *plans[0].writes)]
        key = (
            *(form_of_node(nodes[0]), compute.op, compute.contiguous, lifted, tuple(operands)),
            *(tuple(map(tuple, sizes)), tuple(map(tuple, results)), tuple(starts)),
            tuple(a.dtype for a in _avals(compute.out)),
        )
        if key not in self._shared:
            self._shared[key] = self._make(plans[0], sizes, operands, results, lifted)
        made = self._shared[key]
        if made is None:
            return None
        place = sum(1 for n in self._segments[0].nodes[:index] if n.plan is not None)
        alike = all(
            _equal(made.at(values, self._expressions), signatures[place])
            for signatures, values in zip(self._signatures, self._fit.values)
        )
        return made if alike else None

    def _results(self, plans: Sequence[NodePlan]) -> list[list[Size]] | None:
        """Sizes of all results of the computation, also of those that nothing reads."""
        found = []
        for avals in zip(*(_avals(p.compute.out) for p in plans)):
            if len({len(a.shape) for a in avals}) > 1:
                return None
            sizes = [self._fit.derive(seen) for seen in zip(*(a.shape for a in avals))]
            if None in sizes:
                return None
            found.append([s for s in sizes if s is not None])
        return found

    def _make(
        self,
        plan: NodePlan,
        sizes: Sequence[Sequence[Size]],
        operands: Sequence[tuple[tuple[Size, ...], np.dtype[Any]]],
        results: list[list[Size]],
        lifted: Lifted,
    ) -> _Traced | None:
        sample = self._fit.values[0]
        free = symbolic_dims.dims(len(sample))
        dims = list(free)
        for symbol, relation in self._related.items():
            dims[symbol] = relation.of(dims)

        def expressions(of: Sequence[Size]) -> tuple[Any, ...]:
            return tuple(size.value(dims) for size in of)

        try:
            with symbolic_dims.comparing(free, sample) as conditions:
                own, places, arguments = (iter(expressions(s)) for s in sizes)
                shapes = map(expressions, results)
                symbolic = with_integers(plan, own, places, arguments, shapes)
                avals = [(expressions(shape), dtype) for shape, dtype in operands]
                (form, dtypes, numbers), tables = trace(symbolic, tuple(avals), lifted)
        except Exception as error:  # whatever a lowering makes of a dim that is no integer
            interruptible.pass_on(error)
            logger.debug("%s has no trace with symbolic dims: %s", plan.op, error)
            return None
        varying = [
            (place, self._expressions.add(n))
            for place, n in enumerate(numbers)
            if not isinstance(n, (int, float))
        ]
        compared = [(self._expressions.add(e), kind, holds) for e, kind, holds in conditions]
        return _Traced(form, dtypes, list(numbers), varying, compared, results, tables)


@dataclass(frozen=True, slots=True)
class _Relation:
    """A size that is a multiple of a product of others, or the sum of others and a constant."""

    symbols: tuple[int, ...]
    scale: int  # 0 for a sum
    offset: int = 0

    def of(self, values: Sequence[Any]) -> Any:
        """The size, from those of all symbols: integers or symbolic dims."""
        others = [values[s] for s in self.symbols]
        return self.scale * math.prod(others) if self.scale else sum(others) + self.offset


def _relations(values: Sequence[Sequence[int]], offsets: Sequence[int]) -> dict[int, _Relation]:
    """Symbols that followed from others in all recordings, as in a reshape or `cat`.

    The others have no relation themselves. What is a coincidence does not hold at other sizes.

    Args:
        values: Of the symbols, for each recording.
        offsets: Summand beside each symbol in the integer that it stands for.
    """
    columns = list(zip(*values))
    if len(columns) > _MOST_RELATED:
        return {}
    found: dict[int, _Relation] = {}
    used: set[int] = set()
    for symbol, column in enumerate(columns):
        if symbol in used:
            continue
        others = [s for s in range(len(columns)) if s != symbol and s not in found]
        for relation in _candidates(columns, column[0], others, offsets):
            if all(relation.of(row) == row[symbol] for row in values):
                found[symbol] = relation
                used.update(relation.symbols)
                break
    return found


def _candidates(
    columns: Sequence[Sequence[int]], value: int, others: Sequence[int], offsets: Sequence[int]
) -> Iterator[_Relation]:
    """Relations that give a value in the first recording."""
    several = itertools.combinations_with_replacement
    for pair in several(others, 2):
        product = math.prod(columns[s][0] for s in pair)
        if product and value % product == 0:
            yield _Relation(pair, value // product)
    for count in (2, 3):
        for symbols in several(others, count):
            offset = sum(offsets[s] for s in symbols)
            if sum(columns[s][0] for s in symbols) + offset == value:
                yield _Relation(symbols, 0, offset)
    for s in others:  # the larger one, so that no size may be negative
        if value > columns[s][0]:
            yield _Relation((s,), 0, value - columns[s][0])


def _avals(out: Any) -> list[Any]:
    """Shapes and dtypes of a computation's results, lists flattened."""
    if out is None:
        return []
    return [a for o in out for a in _avals(o)] if isinstance(out, (tuple, list)) else [out]


def _equal(a: Signature, b: Signature) -> bool:
    return a[:2] == b[:2] and len(a[2]) == len(b[2]) and all(map(identical, a[2], b[2]))
