"""A recorded segment as Python sees it, and its lowering to one StableHLO module."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_core import gc_control, interruptible
from tpu_core.compiler.aliases import aliases
from tpu_core.compiler.fusion_depth import FusionDepths
from tpu_core.compiler.recomputation import Barriers
from tpu_core.dtypes import dtype_of_code, to_numpy_dtype
from tpu_core.errors import (
    CompilationError,
    KernelCompilationError,
    KernelRuleError,
    TpuError,
)
from tpu_core.lowering import implementations, selections
from tpu_core.lowering.implementations import KernelSelection
from tpu_core.lowering.views import WHOLE, Access
from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt import jax_settings
from tpu_core.recorder.plan import NodePlan


@dataclass(frozen=True, slots=True)
class Node:
    """One recorded op: its plan (None: uninitialised memory), slots, first number and user line.

    Example:
        >>> [node.name for node in segment.nodes]
        ['aten.add.Tensor', 'aten.sum.dim_IntList']
    """

    plan: NodePlan | None
    operands: list[int]
    outputs: list[int | None]
    numbers: int
    line: str

    @property
    def label(self) -> str:
        """Op and user line, as profiles and HLO text show it: ``train.py:31/aten.mm``."""
        where = self.line.split(" in ")[0].rsplit("/", 1)[-1]
        name = self.name.removesuffix(".default")
        return f"{where}/{name}" if where else name

    @property
    def name(self) -> str:
        """Name of the functional overload."""
        return self.plan.op if self.plan else "uninitialised memory"

    def compared(self) -> list[int]:
        """Operands that the program computes once for all that read them, see `selections`."""
        if self.plan is None:
            return []
        slots = list(dict.fromkeys(self.operands))
        if selections.selects(self.plan.op, (value for _, _, value in self.plan.template)):
            return slots
        if len(slots) == len(self.operands):
            return []
        reads: dict[int, set[Access]] = {}
        for slot, access in zip(self.operands, self.plan.reads):
            reads.setdefault(slot, set()).add(access)
        # Where a window begins is no part of its access.
        return [
            slot
            for slot, seen in reads.items()
            if self.operands.count(slot) > 1 and any(a.form != WHOLE for a in seen)
        ]


@dataclass(frozen=True, slots=True)
class Slot:
    """A value of the segment: an input or a node's output, with the shape and dtype of its
    array.
    """

    is_input: bool
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its array."""
        return int(self.dtype.itemsize * math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class RuntimeScalar:
    """A number of the program: a constant of it, or element of the input ``pack``."""

    pack: int
    compiled_in: bool
    value: float | int


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops recorded between two segment boundaries.

    Attributes:
        key: Process-stable hex key of ops, geometry, liveness and donation.
        device: Index of the device.
        cut: Reason of its end.
        nodes, slots, numbers: Its contents.
        live: Slots whose values are read later: the program's outputs.
        donated: Input slots that nothing else holds: their memory may be reused.
        on_host: CPU kernels are to run it.

    Example:
        >>> len(segment.nodes), [segment.slots[i].shape for i in segment.inputs()]
    """

    key: str
    device: int
    cut: str
    nodes: list[Node]
    slots: list[Slot]
    numbers: list[RuntimeScalar]
    live: list[int]
    donated: list[int]
    on_host: bool = False

    @classmethod
    def from_export(cls, d: dict[str, Any]) -> Segment:
        """From the dict that the extension exports."""
        return cls(
            d["key"],
            d["device"],
            d["cut"],
            [Node(*n) for n in d["nodes"]],
            [Slot(i, to_numpy_dtype(dtype_of_code(t)), tuple(s)) for i, t, s in d["slots"]],
            [RuntimeScalar(*n) for n in d["numbers"]],
            d["live"],
            d["donated"],
            d.get("on_host", False),
        )

    def with_numbers(self, numbers: list[RuntimeScalar]) -> Segment:
        """The same segment with other numbers."""
        return replace(self, numbers=numbers)

    def text(self) -> str:
        """Text that says what it computes, but for its numbers; the same in every process.

        Example:
            >>> segment.text() == segment.with_numbers(others).text()
            True
        """
        return f"{self.key} {implementations.sources()}"

    @property
    def last_line(self) -> str | None:
        """The user's line of the last op that has one."""
        return next((n.line for n in reversed(self.nodes) if n.line), None)

    def op_names(self) -> str:
        """Names of its ops, each once and the first of them, for errors and listings."""
        names = list(dict.fromkeys(n.name for n in self.nodes))
        return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")

    def inputs(self) -> list[int]:
        """Slots of the program's array arguments, in order."""
        return [i for i, s in enumerate(self.slots) if s.is_input]

    def packs(self) -> list[tuple[int, int]]:
        """(pack, length) of each packed argument, in order."""
        lengths = [0] * len(pjrt.PACK_DTYPES)
        for n in self.numbers:
            if not n.compiled_in:
                lengths[n.pack] += 1
        return [(k, n) for k, n in enumerate(lengths) if n]

    def constants(self) -> list[float | int | None]:
        """The numbers compiled in, None for run-time inputs."""
        return [n.value if n.compiled_in else None for n in self.numbers]

    def constants_of(self, node: int) -> list[float | int | None]:
        """Those of one node's numbers, as `constants`."""
        return [n.value if n.compiled_in else None for n in self.numbers_of(node)]

    def numbers_of(self, node: int) -> list[RuntimeScalar]:
        """The numbers of one node."""
        is_last = node + 1 == len(self.nodes)
        end = len(self.numbers) if is_last else self.nodes[node + 1].numbers
        return self.numbers[self.nodes[node].numbers : end]

    def piece(self, node: int, key: str) -> Segment:
        """One node as a segment of its own, whose results are all read later.

        Args:
            node: Its index.
            key: Of the segment.
        """
        n = self.nodes[node]
        places: dict[int, int] = {}
        for slot in (*n.operands, *n.outputs):
            if slot is not None:
                places.setdefault(slot, len(places))
        outputs = [None if slot is None else places[slot] for slot in n.outputs]
        operands = [places[slot] for slot in n.operands]
        return replace(
            self,
            key=key,
            nodes=[replace(n, operands=operands, outputs=outputs, numbers=0)],
            slots=[replace(self.slots[i], is_input=i in n.operands) for i in places],
            numbers=[replace(x, compiled_in=False) for x in self.numbers_of(node)],
            live=[slot for slot in outputs if slot is not None],
            donated=[],
        )

    def outputs(self) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each output."""
        return [(self.slots[i].shape, self.slots[i].dtype) for i in self.live]


def as_function(segment: Segment) -> tuple[Callable[..., list[jax.Array]], list[Any]]:
    """The segment as a JAX function of its inputs and packed numbers, and its argument shapes."""
    inputs, packs = segment.inputs(), segment.packs()
    avals = [jax.ShapeDtypeStruct(segment.slots[i].shape, segment.slots[i].dtype) for i in inputs]
    avals += [jax.ShapeDtypeStruct((n,), pjrt.PACK_DTYPES[k]) for k, n in packs]

    def run(*arguments: jax.Array) -> list[jax.Array]:
        values: dict[int, jax.Array] = dict(zip(inputs, arguments))
        packed = {k: a for (k, _), a in zip(packs, arguments[len(inputs) :])}
        numbers = _numbers(segment, packed)
        readers = Counter([*segment.live, *(s for n in segment.nodes for s in set(n.operands))])
        depths = FusionDepths()
        barriers = Barriers(segment)
        for i, node in enumerate(segment.nodes):
            barriers.before(i, values)
            if node.plan is None:
                (slot,) = node.outputs
                assert slot is not None
                values[slot] = jnp.zeros(segment.slots[slot].shape, segment.slots[slot].dtype)
                continue
            for slot in node.compared():
                is_met = readers[slot] > 1 or node.operands.count(slot) > 1
                if slot not in inputs and (is_met or selections.finds_places(node.name)):
                    values[slot] = selections.shared(values[slot])
            operands = [values[i] for i in node.operands]
            try:
                with jax.named_scope(f"{node.label}#{i}"), KernelSelection.recording() as uses:
                    results = node.plan.lower(operands, iter(_Tail(numbers, node.numbers)))
            except KernelRuleError as error:
                raise error.at(node.line) from None
            except TpuError:
                raise
            except Exception as error:
                interruptible.pass_on(error)
                shapes = ", ".join(f"{o.dtype}{list(o.shape)}" for o in operands)
                failed = CompilationError(
                    f"The lowering of {node.name} failed: {type(error).__name__}: {error}",
                    values={"operands": shapes},
                    line=node.line or None,
                )
                failed.node = i
                raise failed from error
            for use in uses:
                use.report(node.line)
            for slot, value in zip(node.outputs, results):
                if slot is not None:
                    expected = segment.slots[slot]
                    # A view's write keeps the base's shape; anything else is an error in a
                    # lowering.
                    if value.shape != expected.shape:
                        value = value.reshape(expected.shape)
                    values[slot] = value.astype(expected.dtype)
            made = [i for i in node.outputs if i is not None]
            depths.bound(node.name, node.operands, made, values)
        return [values[i] for i in segment.live]

    return run, avals


class _Tail:
    """Numbers from one position on, as an iterable."""

    def __init__(self, numbers: list[Any], start: int) -> None:
        self._numbers, self._start = numbers, start

    def __iter__(self) -> Iterator[Any]:
        for i in range(self._start, len(self._numbers)):
            yield self._numbers[i]()


def _constant(value: float | int) -> float | int:
    return value


def _element(pack: jax.Array, index: int) -> jax.Array:
    return pjrt.weak(pack[index])


def _numbers(segment: Segment, packed: dict[int, jax.Array]) -> list[Callable[[], Any]]:
    """A thunk for each number, so that an unread one costs no op."""
    position = [0] * len(pjrt.PACK_DTYPES)
    thunks: list[Callable[[], Any]] = []
    for n in segment.numbers:
        if n.compiled_in:
            thunks.append(functools.partial(_constant, n.value))
        else:
            thunks.append(functools.partial(_element, packed[n.pack], position[n.pack]))
            position[n.pack] += 1
    return thunks


def lower(segment: Segment) -> bytes:
    """StableHLO bytecode of the segment."""
    run, avals = as_function(segment)
    with gc_control.paused(), jax_settings.lowering(), KernelCompilationError.raising():
        lowered = implementations.lower_for_target(run, *avals)
    return pjrt.module_bytes(lowered, aliases(segment))


def write_dot(path: str, exported: dict[str, Any]) -> None:
    """Write a captured graph in the DOT language: ops with shapes and lines, edges for tensors."""
    segment = Segment.from_export(exported)
    rows = ["digraph captured {", "  node [shape=box];"]
    makers: dict[int, int] = {}
    for i, node in enumerate(segment.nodes):
        results = [
            f"{segment.slots[slot].dtype}{list(segment.slots[slot].shape)}"
            for slot in node.outputs
            if slot is not None
        ]
        label = "\n".join([node.name, ", ".join(results), node.line or ""]).rstrip()
        rows.append(f"  n{i} [label={json.dumps(label)}];")
        rows += [f"  n{makers[slot]} -> n{i};" for slot in node.operands if slot in makers]
        makers.update({slot: i for slot in node.outputs if slot is not None})
    Path(path).write_text("\n".join([*rows, "}", ""]))
