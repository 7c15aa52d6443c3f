"""Common form of two recordings of a program, and the integers in which they may differ."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from tpu_core.compiler.segment import Node, Segment
from tpu_core.dtypes import dtype_text
from tpu_core.lowering.views import SLICE, WHOLE, Access
from tpu_core.recorder.compute import LoweringCompute
from tpu_core.recorder.dynamic_arguments import OF_TENSORS
from tpu_core.recorder.plan import Blank, NodePlan, Number, Operand, Repeated, _Written

_T = TypeVar("_T")


# Bytes of inputs that are worth a program of their own where their memory can be reused.
_LEAST_REUSED = 4 * 2**20


def reused(segment: Segment) -> list[int]:
    """Slots of inputs whose memory the results of a padded program take, where that is much.

    What nothing else holds differs from step to step, and so would the programs.
    """
    nbytes = sum(segment.slots[i].nbytes for i in segment.donated)
    return segment.donated if nbytes >= _LEAST_REUSED else []


@dataclass(frozen=True, slots=True)
class Description:
    """A segment's form, and its integers.

    Attributes:
        form: Process-stable key of the segment without its sizes. It holds every static argument
            that is not declared a size.
        outline: The form, but for which sizes are 1: a program for larger ones may serve those.
        integers: Those that may vary, in a fixed order.
        tensors: Number of them, the first ones, that are of tensors: sizes, then strides and
            offsets. Those may define a size, the arguments that come last must follow.
    """

    form: str
    outline: str
    integers: list[int]
    tensors: int


def describe(segment: Segment) -> Description:
    """Form of a segment, and its sizes."""
    sizes = [n for s in segment.slots for n in s.shape]
    places: list[int] = []
    arguments: list[int] = []
    digest = hashlib.sha256()
    packs = [n.pack for n in segment.numbers]
    digest.update(repr((packs, segment.live)).encode())
    for node in segment.nodes:
        form, own_sizes, own_places, own_arguments = _node(node)
        digest.update(form.encode())
        digest.update(repr((node.operands, node.outputs, node.numbers)).encode())
        sizes += own_sizes
        places += own_places
        arguments += own_arguments
    # Empty dims have no elements: those are other programs.
    slots = [(s.is_input, dtype_text(s.dtype), [min(n, 1) for n in s.shape]) for s in segment.slots]
    digest.update(repr((slots, reused(segment))).encode())
    outline = digest.hexdigest()
    # Dims of size 1 are broadcast, those of views too.
    digest.update(repr([i for i, n in enumerate(sizes) if n == 1]).encode())
    integers = sizes + places + arguments
    return Description(digest.hexdigest(), outline, integers, len(sizes) + len(places))


def shapes_of_slots(segment: Segment, integers: Sequence[_T]) -> list[tuple[_T, ...]]:
    """For each slot what stands in the place of its shape among the integers of `describe`."""
    rest = iter(integers)
    return [tuple(itertools.islice(rest, len(s.shape))) for s in segment.slots]


def integers_of_inputs(segment: Segment) -> set[int]:
    """Positions of the sizes of inputs among the integers of `describe`."""
    shapes = shapes_of_slots(segment, range(sum(len(s.shape) for s in segment.slots)))
    return {i for slot, shape in zip(segment.slots, shapes) if slot.is_input for i in shape}


def places_of_nodes(segment: Segment) -> list[list[range]]:
    """For each node the positions of its sizes, places and arguments among the integers of
    `describe`.
    """
    counts = [[len(own) for own in sizes_of_node(node)] for node in segment.nodes]
    position = sum(len(s.shape) for s in segment.slots)
    found: list[list[range]] = [[] for _ in counts]
    for kind in range(3):
        for own, count in zip(found, counts):
            own.append(range(position, position + count[kind]))
            position += count[kind]
    return found


def form_of_node(node: Node) -> str:
    """The arguments of a node without the integers that may vary."""
    return _node(node)[0]


def sizes_of_node(node: Node) -> tuple[tuple[int, ...], ...]:
    """The integers of a node that may vary: sizes, places and arguments that are sizes."""
    return _node(node)[1:]


_Described = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _node(node: Node) -> _Described:
    return ("uninitialised", (), (), ()) if node.plan is None else _plan(node.plan)


@functools.lru_cache(maxsize=16384)
def _plan(plan: NodePlan) -> _Described:
    """Form of a plan; sizes of the tensors that it reads and writes; strides and offsets that the
    form does not say; arguments that are sizes.
    """
    form = [plan.op, plan.precision, str(plan.choices), str(plan.random), str(plan.order)]
    form += [plan.identity, str(plan.default_dtype), str(plan.jax_settings)]
    form.append(str(plan.checks))
    sizes: list[int] = []
    places: list[int] = []
    arguments: list[int] = []

    def walk(value: Any, found: list[int] | None = None) -> None:
        if found is not None and _may_vary(value, found is sizes):
            # Without elements it is another program, as a tensor is; so is an argument below zero.
            is_other = value < 0 if found is arguments else not value
            form.append("0" if is_other else "i")
            found.append(int(value))
        elif isinstance(value, (list, tuple)):
            form.append(f"[{type(value).__name__}{len(value)}")
            for v in value:
                walk(v, found)
        elif isinstance(value, Operand):
            form.append(f"o{value.index}")
        elif isinstance(value, Number):
            form.append(f"n{value.dtype}")
        elif isinstance(value, Repeated):
            form.append(f"r{value.count}")
        elif isinstance(value, Blank):
            form.append(f"b{dtype_text(value.aval.dtype)}{len(value.aval.shape)}")
            sizes.extend(value.aval.shape)
        elif isinstance(value, _Written):
            form.append("w")
            walk(value.read)
        elif isinstance(value, Access):
            base, dtype = dtype_text(value.base_dtype), dtype_text(value.dtype)
            form.append(f"a{value.form}{base}{dtype}{value.dims}")
            form.append(f"{value.overwrites}{value.chained}")
            form.append(f"{len(value.base_sizes)} {len(value.sizes)}")
            sizes.extend((*value.base_sizes, *value.sizes))
            form.append(_strides(value.base_sizes, value.base_strides, places))
            if _is_window(value):
                form.append("window")
            else:
                form.append(_strides(value.sizes, value.strides, places))
            if value.form != SLICE:  # whose starts are run-time inputs
                places.append(value.offset)
        else:
            form.append(f"{type(value).__name__} {value!r}")

    for name, keyword, value in plan.template:
        form.append(f"{name}{keyword}")
        walk(value, _integers_of(name, plan, sizes, arguments))
    walk([*plan.reads, *plan.writes])
    return "|".join(form), tuple(sizes), tuple(places), tuple(arguments)


def _may_vary(value: Any, is_size: bool) -> bool:
    """Return whether a value is an integer that may vary; a size is none below zero."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_integer and (value >= 0 or not is_size)


def _integers_of(name: str, plan: NodePlan, sizes: _T, arguments: _T) -> _T | None:
    """``sizes`` or ``arguments``, whichever the integers of an argument are among, or None."""
    return None if name not in plan.sizes else sizes if name in OF_TENSORS else arguments


def with_integers(
    plan: NodePlan,
    sizes: Iterator[Any],
    places: Iterator[Any],
    arguments: Iterator[Any],
    results: Iterator[Any],
) -> NodePlan:
    """The plan with others in place of the integers that may vary.

    Args:
        plan: One whose computation is a lowering.
        sizes, places, arguments: Integers or symbolic dims, in the order of `sizes_of_node`.
        results: The shape of each result of its computation.
    """

    def walk(value: Any, given: Iterator[Any] | None = None) -> Any:
        if given is not None and _may_vary(value, given is sizes):
            return next(given)
        if isinstance(value, (list, tuple)):
            return type(value)([walk(v, given) for v in value])
        if isinstance(value, Blank):
            shape = tuple(next(sizes) for _ in value.aval.shape)
            return Blank(jax.ShapeDtypeStruct(shape, value.aval.dtype))
        if isinstance(value, _Written):
            return _Written(walk(value.read))
        return access(value) if isinstance(value, Access) else value

    def access(value: Access) -> Access:
        base_sizes = tuple(next(sizes) for _ in value.base_sizes)
        own = tuple(next(sizes) for _ in value.sizes)
        base_strides = _other_strides(value.base_sizes, value.base_strides, base_sizes, places)
        if not _is_window(value):
            strides = _other_strides(value.sizes, value.strides, own, places)
        elif value.form == WHOLE:
            strides = base_strides
        else:
            kept = {d: j for j, d in enumerate(value.dims) if d >= 0}
            strides = tuple(base_strides[kept[d]] if d in kept else 0 for d in range(len(own)))
        return _Resized(
            form=value.form,
            base_dtype=value.base_dtype,
            base_sizes=base_sizes,
            base_strides=base_strides,
            dtype=value.dtype,
            sizes=own,
            strides=strides,
            offset=value.offset if value.form == SLICE else next(places),
            dims=value.dims,
            overwrites=value.overwrites,
            chained=value.chained,
            started=tuple(value.starts()),
        )

    def aval(out: Any) -> Any:
        if out is None:
            return None
        if isinstance(out, (list, tuple)):
            return type(out)([aval(o) for o in out])
        return jax.ShapeDtypeStruct(next(results), out.dtype)

    template = [
        (n, k, walk(value, _integers_of(n, plan, sizes, arguments)))
        for n, k, value in plan.template
    ]
    reads = [access(a) for a in plan.reads]
    writes = [access(a) for a in plan.writes]
    assert isinstance(plan.compute, LoweringCompute)
    return plan.resized(template, reads, writes, plan.compute.returning(aval(plan.compute.out)))


@dataclass(frozen=True, slots=True)
class _Resized(Access):
    """An access with symbolic sizes, whose windows start where another's do."""

    started: tuple[int, ...] = ()

    def starts(self) -> list[int]:
        return list(self.started)


def _other_strides(
    sizes: tuple[int, ...], strides: tuple[int, ...], others: tuple[Any, ...], places: Iterator[Any]
) -> tuple[Any, ...]:
    """Strides for other sizes, as `_strides` reads them."""
    if _strides(sizes, strides, []) == "strides":
        return tuple(next(places) for _ in strides)
    found = [1] * len(sizes)
    expected: Any = 1
    for d in sorted(range(len(sizes)), key=lambda d: (strides[d], -d)):
        found[d] = expected
        expected *= others[d]
    return tuple(found)


def _strides(sizes: tuple[int, ...], strides: tuple[int, ...], places: list[int]) -> str:
    """Order of the dims in memory where they lie densely; else the strides join ``places``."""
    order = sorted(range(len(sizes)), key=lambda d: (-strides[d], d))
    expected = 1
    for d in reversed(order):
        if strides[d] != expected:
            places.extend(strides)
            return "strides"
        expected *= sizes[d]
    return f"dense {order}"


def _is_window(access: Access) -> bool:
    """Return whether the tensor's strides are those of its base, 0 where it repeats an element."""
    if access.form == WHOLE:
        return access.strides == access.base_strides
    if access.form != SLICE:
        return False
    kept = {d: j for j, d in enumerate(access.dims) if d >= 0}
    return all(
        stride == (access.base_strides[kept[d]] if d in kept else 0)
        for d, stride in enumerate(access.strides)
    )
