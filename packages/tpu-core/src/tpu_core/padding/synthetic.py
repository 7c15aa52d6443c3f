"""Synthetic recordings at other sizes, for a segment whose graphs declare dynamic sizes.

The sizes of a segment of plain ops are found out by comparing it with a later one. A compiled graph
knows its open sizes, so recordings for other sizes are made up, and the first size already runs on
padded arrays. Sizes made up are primes where they can be: two that are equal, or one twice the
other, would be taken for related.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import jax

from tpu_core.compiler.segment import Node, Segment, Slot
from tpu_core.lowering import checks, views
from tpu_core.lowering.views import Access
from tpu_core.recorder.compute import LoweringCompute
from tpu_core.recorder.plan import NodePlan

_SAMPLES = 3
_PRIMES = (11, 17, 29, 13, 31, 19, 37, 23, 43, 41, 61, 47, 53, 71, 59, 67, 89, 73, 79, 101, 83)
_SCALES = (1, 2, 4, 8, 16, 3, 6, 12, 5, 10, 7, 14)  # for graphs that take only multiples


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim of an operand or a result whose size is an open size of its graph.

    Attributes:
        tensor: Index of the operand or result.
        dim: The dim.

    Example:
        >>> Dim(tensor=0, dim=1)  # the columns of the first operand
    """

    tensor: int
    dim: int


@dataclass(frozen=True, slots=True)
class DynamicSize:
    """A size that a graph leaves open.

    Attributes:
        origin: Identity: equal in graphs that share the size.
        low, high: Its range; `high` is None where there is no bound.
        varies: Whether it is expected to vary; one that is not stays as it is.
        operands, results: The dims that have it.

    Example:
        >>> batch = Dim(0, 0)
        >>> DynamicSize("s0", 2, None, True, operands=(batch,), results=(batch,))
    """

    origin: Hashable
    low: int
    high: int | None
    varies: bool
    operands: tuple[Dim, ...]
    results: tuple[Dim, ...]


Shape = tuple[int, ...]


class DynamicGraph(Protocol):
    """Interface of a graph with dynamic sizes; its op takes ``(inputs, sizes, ..., key)``, and may
    take ``inner_sizes``.
    """

    @property
    def ops(self) -> Sequence[str]:
        """Names of its ops."""
        ...

    @property
    def open(self) -> Sequence[DynamicSize]:
        """Its open sizes."""
        ...

    def values(self, numbers: Sequence[int], shapes: Sequence[Shape]) -> list[int]:
        """Values of the open sizes in a call with these size inputs and operand shapes."""
        ...

    def holds(self, values: Sequence[int]) -> bool:
        """Return whether the graph takes such values."""
        ...

    def numbers(self, values: Sequence[int]) -> list[int]:
        """The size inputs of a call with these values."""
        ...

    def inner_sizes(self, values: Sequence[int]) -> list[int]:
        """Sizes of tensors inside of the graph that are no sum or product of those of operands."""
        ...

    def operands(self, values: Sequence[int]) -> list[tuple[Shape, Shape]]:
        """Shape and strides of each operand."""
        ...

    def shapes(self, values: Sequence[int]) -> list[Shape]:
        """Shape of each result."""
        ...


_FINDERS: dict[str, Callable[[str], DynamicGraph]] = {}


def register_dynamic_graph(op: str, find: Callable[[str], DynamicGraph]) -> None:
    """Declare an op that stands for graphs; ``find`` gives one by the op's argument ``key``."""
    _FINDERS[op] = find


def has_graphs(segment: Segment) -> bool:
    """Return whether an op of the segment may tell of its sizes."""
    return any(node.name in _FINDERS for node in segment.nodes)


def has_lost_graphs(segment: Segment) -> bool:
    """Return whether a graph that an op stands for was let go of, so that it cannot be lowered."""
    try:
        for node in segment.nodes:
            _graph_of(node)
    except KeyError:
        return True
    return False


def ops_of(node: Node) -> Sequence[str]:
    """Names of what a node computes: its op, or those of the graph that it stands for."""
    graph = _graph_of(node)
    return (node.name,) if graph is None else graph.ops


class _NotDerivable(Exception):
    """Sizes of a segment cannot be told from its graphs."""


@dataclass(slots=True)
class _Variable:
    """An open size of the segment, in one or several graphs."""

    value: int
    low: int
    high: int | None
    varies: bool


@dataclass(frozen=True, slots=True)
class SyntheticRecordings:
    """Recordings derived from declared dynamic sizes, before a second size was seen.

    Attributes:
        segments: The segment for sizes made up.
        values: For each of them the values of the sizes that vary.
        limits: The bound of each such size, or None.
    """

    segments: list[Segment]
    values: list[list[int]]
    limits: list[int | None]


def synthesize(segment: Segment) -> SyntheticRecordings | None:
    """Recordings of the segment for other sizes; None where its graphs do not say enough.

    Args:
        segment: Recorded with any sizes.
    """
    try:
        reader = _Reader(segment)
        varying = [v for v in reader.variables if v.varies]
        if not varying:
            return None
        segments, values = [], []
        for sizes in _samples(reader):
            segments.append(reader.resized(sizes))
            values.append([n for v, n in zip(reader.variables, sizes) if v.varies])
    except _NotDerivable:
        return None
    if len(segments) < 2:
        return None
    return SyntheticRecordings(segments, values, [v.high for v in varying])


def _samples(reader: _Reader) -> Iterator[list[int]]:
    """Values of all variables, different and unrelated in each sample."""
    for sample in range(_SAMPLES):
        for scale in _SCALES:
            sizes = list(_scaled(reader.variables, sample, scale))
            if reader.holds(sizes):
                yield sizes
                break


def _scaled(variables: Sequence[_Variable], sample: int, scale: int) -> Iterator[int]:
    for i, v in enumerate(variables):
        if not v.varies:
            yield v.value
            continue
        low = max(v.low, 2)
        n = _PRIMES[(_SAMPLES * i + sample) % len(_PRIMES)] * scale
        while n < low:
            n *= 2
        if v.high is not None and n > v.high:
            step = scale * ((sample + i) % _SAMPLES + 1)
            n = max(v.high - step, low)
        yield n


class _Reader:
    """Finds the open sizes of a segment, and makes the segment for others.

    Raises:
        _NotDerivable: An op that is no graph depends on one of them.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.variables: list[_Variable] = []
        self._graphs: list[DynamicGraph | None] = []
        # Of each graph's open sizes the variable.
        self._indices: list[list[int]] = []
        by_origin: dict[Hashable, int] = {}
        by_dim: dict[tuple[int, int], int] = {}
        for node in segment.nodes:
            graph = _graph_of(node)
            self._graphs.append(graph)
            self._indices.append([])
            if graph is None or node.plan is None:
                continue
            shapes = [read.sizes for read in node.plan.reads]
            values = graph.values(node.plan.argument("sizes"), shapes)
            for size, value in zip(graph.open, values):
                dims = [(node.operands[d.tensor], d.dim) for d in size.operands]
                known = [by_dim[d] for d in dims if d in by_dim]
                index = by_origin.get(size.origin, known[0] if known else len(self.variables))
                if index == len(self.variables):
                    self.variables.append(_Variable(value, size.low, size.high, size.varies))
                self._narrow(index, size, value, node.plan)
                by_origin[size.origin] = index
                self._indices[-1].append(index)
                for d in size.results:
                    slot = node.outputs[d.tensor]
                    if slot is not None:
                        by_dim[slot, d.dim] = index
                by_dim.update(dict.fromkeys(dims, index))

    def _narrow(self, index: int, size: DynamicSize, value: int, plan: NodePlan) -> None:
        variable = self.variables[index]
        if variable.value != value:
            raise _NotDerivable
        variable.low = max(variable.low, size.low)
        bounds = [variable.high, size.high]
        for d in size.operands:
            read = plan.reads[d.tensor]
            if read.form == views.SLICE:
                # A window stays smaller than what it is cut from.
                if d.dim not in read.dims:  # of one element
                    raise _NotDerivable
                base = read.base_sizes[read.dims.index(d.dim)]
                bounds.append(base - 1 if base > value else None)
        variable.high = min((b for b in bounds if b is not None), default=None)

    def _values(self, node: int, sizes: Sequence[int]) -> list[int]:
        return [sizes[i] for i in self._indices[node]]

    def holds(self, sizes: Sequence[int]) -> bool:
        """Return whether all graphs take these values."""
        ranges = all(
            v.low <= n and (v.high is None or n <= v.high) for v, n in zip(self.variables, sizes)
        )
        return ranges and all(
            graph is None or graph.holds(self._values(i, sizes))
            for i, graph in enumerate(self._graphs)
        )

    def resized(self, sizes: Sequence[int]) -> Segment:
        """The segment with other values of the variables."""
        s = self._segment
        shapes: dict[int, Shape] = {}
        nodes = []
        for i, (node, graph) in enumerate(zip(s.nodes, self._graphs)):
            if graph is None or node.plan is None:
                if any(k in shapes and shapes[k] != s.slots[k].shape for k in node.operands):
                    raise _NotDerivable
                nodes.append(node)
                continue
            values = self._values(i, sizes)
            reads = [
                _resized(read, *geometry)
                for read, geometry in zip(node.plan.reads, graph.operands(values), strict=True)
            ]
            for slot, read in zip(node.operands, reads):
                if s.slots[slot].is_input:
                    shapes.setdefault(slot, read.base_sizes)
                if shapes.get(slot, s.slots[slot].shape) != read.base_sizes:
                    raise _NotDerivable
            made = graph.shapes(values)
            if node.plan.checks:
                made = [*made, checks.WORD.shape]
            shapes |= {k: n for k, n in zip(node.outputs, made, strict=True) if k is not None}
            plan = _plan(node.plan, graph, values, reads)
            nodes.append(replace(node, plan=plan))
        slots = [Slot(x.is_input, x.dtype, shapes.get(k, x.shape)) for k, x in enumerate(s.slots)]
        return replace(s, key=f"{s.key} for {sizes}", nodes=nodes, slots=slots)


def _graph_of(node: Node) -> DynamicGraph | None:
    find = _FINDERS.get(node.name)
    if find is None or node.plan is None or node.plan.writes:
        return None
    return find(node.plan.argument("key"))


def _plan(
    plan: NodePlan, graph: DynamicGraph, values: Sequence[int], reads: list[Access]
) -> NodePlan:
    sizes = {"sizes": graph.numbers, "inner_sizes": graph.inner_sizes}
    template = [
        (name, keyword, sizes[name](values) if name in sizes else value)
        for name, keyword, value in plan.template
    ]
    compute, results = plan.compute, graph.shapes(values)
    if not isinstance(compute, LoweringCompute):
        raise _NotDerivable
    (before,) = compute.out
    out = [jax.ShapeDtypeStruct(shape, o.dtype) for shape, o in zip(results, before, strict=True)]
    return plan.resized(template, reads, plan.writes, compute.returning((out,)))


def _resized(read: Access, sizes: Shape, strides: Shape) -> Access:
    """Access to an operand of another size.

    Raises:
        _NotDerivable: The layout of what it is read from does not follow.
    """
    if sizes == read.sizes:
        return read
    if read.form == views.WHOLE:
        return replace(read, base_sizes=sizes, base_strides=strides, sizes=sizes, strides=strides)
    if read.form != views.SLICE:
        raise _NotDerivable
    base = list(read.base_sizes)
    for j, d in enumerate(read.dims):
        if d >= 0 and read.sizes[d] == base[j]:
            base[j] = sizes[d]
    base_strides = read.base_strides
    if tuple(base) != read.base_sizes:
        base_strides = _dense(base, read)
    if any(d >= 0 and strides[d] != base_strides[j] for j, d in enumerate(read.dims)):
        raise _NotDerivable
    return replace(
        read, base_sizes=tuple(base), base_strides=base_strides, sizes=sizes, strides=strides
    )


def _dense(sizes: Sequence[int], read: Access) -> Shape:
    """Strides of a base without gaps, its dims in the order that they have now."""
    order = sorted(range(len(sizes)), key=lambda j: (-read.base_strides[j], j))
    strides = [0] * len(sizes)
    for position, j in enumerate(order):
        rest = order[position + 1 :]
        if read.base_strides[j] != math.prod(read.base_sizes[k] for k in rest):
            raise _NotDerivable
        strides[j] = math.prod(sizes[k] for k in rest)
    return tuple(strides)
