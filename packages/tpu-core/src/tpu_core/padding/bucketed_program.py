"""A program whose sizes vary: its recordings, and the executables that serve buckets of sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr

from tpu_core.compiler.segment import RuntimeScalar, Segment
from tpu_core.lowering.tables import Table
from tpu_core.padding import padded_module
from tpu_core.padding.family_signatures import FamilySignatures
from tpu_core.padding.fit import Fit
from tpu_core.padding.origins import origins_of_results, stepped_sizes
from tpu_core.padding.recording import integers_of_inputs, reused, shapes_of_slots
from tpu_core.padding.segment_signature import SegmentSignatures
from tpu_core.padding.sizes import LEAST, Size, bucket
from tpu_core.padding.synthetic import SyntheticRecordings
from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt.padded_array import PaddedArray

_MOST_RECORDINGS = 5
_MOST_FAILURES = 3
_FEW_SIZES = 2
_STARTS = pjrt.PACK_DTYPES.index(np.dtype(np.int32))  # the pack of starts of windows


@dataclass(slots=True, eq=False)
class Recording:
    """A segment as it was recorded once, its integers, and the program that runs it as it is."""

    segment: Segment
    integers: list[int]
    program: Any


class BucketedProgram:
    """Recordings of one program that differ in sizes.

    Args:
        signatures: Sub-programs of a segment's ops.
        form: Of its segments.
        tensors: Number of the integers, the first ones, that are of tensors.

    Attributes:
        recordings: The first ones, each of other sizes.
        problem: Reason why it could not run on padded arrays when that was last tried, or None.
        refusal: Reason why that is not tried any more, or None.
        fit: Relations of the sizes, once there are two recordings.
        programs: Programs by bucket of each symbol.
        starts_vary: Whether starts of windows are inputs, as once one was seen to vary.
        kept: Signature and buckets of what `StoredFamilies` has of it.
    """

    def __init__(self, signatures: SegmentSignatures, form: str, tensors: int) -> None:
        self._signatures = signatures
        self.form = form
        self._tensors = tensors
        self.recordings: list[Recording] = []
        self.problem: str | None = None
        self.refusal: str | None = None
        self.fit: Fit | None = None
        self.programs: dict[tuple[int, ...], Any] = {}
        self._traces: list[ClosedJaxpr] = []
        self._known: FamilySignatures | None = None
        self._shapes: list[tuple[Size, ...]] | None = None
        self._signature = ""
        self._failures = 0
        self.starts_vary = False
        self._stored: tuple[str, set[tuple[int, ...]]] = "", set()
        self.kept: tuple[str, set[tuple[int, ...]]] | None = None
        # Of the declared sizes: their positions among the integers, and their bounds.
        self._first: list[int] = []
        self._limits: list[int | None] = []

    @classmethod
    def from_synthetic(
        cls, synthetic: SyntheticRecordings, recordings: list[Recording], family: BucketedProgram
    ) -> BucketedProgram:
        """A family of recordings that were made up.

        Args:
            synthetic: Declared sizes.
            recordings: Those of ``synthetic.segments``.
            family: Without recordings.
        """
        columns = list(zip(*(r.integers for r in recordings)))
        family.recordings = recordings
        family._first = [columns.index(values) for values in zip(*synthetic.values)]
        family._limits = synthetic.limits
        return family

    def restore(
        self,
        recordings: list[Recording],
        starts_vary: bool,
        signature: str,
        stored: set[tuple[int, ...]],
    ) -> None:
        """Take over the recordings of another process, and which programs it made.

        Args:
            recordings: In its order.
            starts_vary: As the attribute.
            signature: Of the programs.
            stored: Their buckets.
        """
        self._restart([])
        self.recordings, self.starts_vary = recordings, starts_vary
        self._stored = signature, stored

    def stored(self) -> set[tuple[int, ...]]:
        """Buckets of the programs that other processes have made, of the sizes as known now."""
        signature, stored = self._stored
        return stored if stored and signature == self.signature() else set()

    def has_programs(self) -> bool:
        """Return whether there may be a program, in memory or of another process."""
        return bool(self.programs or self._stored[1])

    def refuse(self, why: str) -> None:
        """Take note that the recordings could not be run on padded arrays.

        One of them may have been of a special size (one that equals another dim), so it is tried
        again with others before the family is given up.
        """
        self._failures += 1
        self.problem = why
        self._first, self._limits = [], []
        self._restart([])
        if self._failures == _MOST_FAILURES:
            self.refusal = why

    def add(self, recording: Recording) -> None:
        """Take note of a segment that runs as it was recorded."""
        if recording.program is None or self._has_sizes(recording):
            return
        if not self.programs or self._ops().are_of(self._numbered(recording.segment)):
            self._restart([*self.recordings, recording])

    def observe(self, recording: Recording) -> None:
        """Take note of a segment that runs without a program, while there is no padded one."""
        is_wanted = len(self.recordings) < _MOST_RECORDINGS and not self.programs
        if is_wanted and not self.refusal and not self._has_sizes(recording):
            self._restart([*self.recordings, recording])

    def _has_sizes(self, recording: Recording) -> bool:
        return any(r.integers == recording.integers for r in self.recordings)

    def solve_outline(self, segment: Segment, integers: list[int]) -> list[int] | None:
        """As `solve`, for a segment in which sizes that vary in the family are 1.

        A lowering may do something else at one element, as `linspace` does: its ops, traced at
        these very sizes, must be the family's.
        """
        values = self._solve(segment, integers, least=1) if self.programs else None
        if values is None or not self._ops().agree(self._numbered(segment), values, traced=True):
            return None
        return values

    def solve(self, segment: Segment, integers: list[int], learns: bool = True) -> list[int] | None:
        """The symbols' values in a segment; None where it is no member of the family.

        Args:
            segment: The segment.
            integers: Its integers.
            learns: Whether what does not follow the sizes as known so far makes them known better,
                for the next; programs for what was known before are dropped then.
        """
        if not self.recordings:
            return None
        values = self._solve(segment, integers)
        if values is None or not self._ops().agree(self._numbered(segment), values):
            # What has other ops is no member, and there are programs for those that are.
            fits = values is not None and self.programs
            if not learns or (fits and not self._ops().are_of(self._numbered(segment))):
                return None
            before = self.recordings, self.fit, self.programs, self._traces, self._known
            signature = self._signature
            self._restart([*self.recordings, Recording(segment, integers, None)])
            values = self._solve(segment, integers)
            # Dims of size 1 are broadcast, so such a recording is another program.
            if values is None or any(v < LEAST for r in self._related().values for v in r):
                self.recordings, self.fit, self.programs, self._traces, self._known = before
                self._signature = signature
                return None
        return values

    def _restart(self, recordings: list[Recording]) -> None:
        # One that has a program of its own stays: padded ones are checked against it.
        exact = [r for r in recordings if r.program is not None][-1:]
        others = [r for r in recordings if r not in exact]
        self.recordings = exact + others[-_MOST_RECORDINGS + 1 :]
        self.fit = None
        self.programs = {}
        self._traces = []
        self._known = None
        self._shapes = None
        self._signature = ""

    def _solve(self, segment: Segment, integers: list[int], least: int = LEAST) -> list[int] | None:
        if len(self.recordings) < 2:
            return None
        fit = self._related()
        values = fit.solve(integers)
        if values is None or not values or any(v < least for v in values):
            return None
        numbers = list(zip(segment.numbers, self.constants()))
        varied = [n for n, c in numbers if c is not None and not _same(n.value, c)]
        if not self.starts_vary and any(n.pack == _STARTS for n in varied):
            self.starts_vary = True
            self._restart(self.recordings)  # whose ops take them as inputs
        return None if varied else values

    def _related(self) -> Fit:
        if self.fit is None:
            segment = self.recordings[0].segment
            inputs, origins = integers_of_inputs(segment), origins_of_results(segment)
            known = [r.integers for r in self.recordings]
            stepped = stepped_sizes(segment)
            self.fit = Fit(known, self._first, self._tensors, inputs, origins, stepped)
        return self.fit

    def independent_sizes(self) -> int:
        """Number of sizes from which all others follow."""
        return len(self._related().symbols)

    def _ops(self) -> FamilySignatures:
        if self._known is None:
            assert self.fit is not None
            segments = [self._numbered(r.segment) for r in self.recordings]
            self._known = FamilySignatures(self._signatures, segments, self.fit)
        return self._known

    def seen(self) -> list[list[int]]:
        """Values of the symbols in the recordings that were not made up."""
        assert self.fit is not None
        pairs = zip(self.recordings, self.fit.values)
        return [values for r, values in pairs if r.program or not self._limits]

    def has_few_sizes(self) -> bool:
        """Return whether its sizes follow from at most `_FEW_SIZES` of them."""
        return self.fit is not None and len(self.fit.symbols) <= _FEW_SIZES

    def differing_op(self) -> str:
        """Label of the first op that is another function of its sizes in another recording."""
        if self.fit is None:
            return ""
        nodes = [n for n in self.recordings[0].segment.nodes if n.plan is not None]
        return next((n.label for n, (f, _) in zip(nodes, self._ops().expected) if not f), "")

    def signature(self) -> str:
        """Digest of the known sizes; with the form it identifies a padded program."""
        assert self.fit is not None
        if not self._signature:
            inside = [(f, [str(n) for n in ns]) for f, ns in self._ops().expected]
            text = f"{self.fit.sizes}{inside}"
            self._signature = hashlib.sha256(text.encode()).hexdigest()
        return self._signature

    def _numbered(self, segment: Segment) -> Segment:
        """A member's segment, with the numbers that vary as run-time inputs."""
        return segment.with_numbers(
            [
                RuntimeScalar(n.pack, constant is not None, n.value)
                for n, constant in zip(segment.numbers, self.constants())
            ]
        )

    def constants(self) -> list[float | int | None]:
        """The numbers compiled in: those that never varied."""
        first = self.recordings[0].segment.numbers
        return [
            n.value
            if not (self.starts_vary and n.pack == _STARTS)
            and all(
                r.segment.numbers[i].compiled_in and _same(r.segment.numbers[i].value, n.value)
                for r in self.recordings
            )
            else None
            for i, n in enumerate(first)
        ]

    def shape(self, slot: int) -> tuple[Size, ...]:
        """The sizes of a value."""
        assert self.fit is not None
        if self._shapes is None:
            self._shapes = shapes_of_slots(self.recordings[0].segment, self.fit.sizes)
        return self._shapes[slot]

    def buckets(self, values: Sequence[int], room: Sequence[int] | None = None) -> tuple[int, ...]:
        """Padded size of each symbol, so that every value between programs fits its array.

        Args:
            values: Sizes of the symbols.
            room: Larger sizes that are to fit as well, up to the declared bounds.
        """
        segment = self.recordings[0].segment
        sizes = {s for i in (*segment.inputs(), *segment.live) for s in self.shape(i)}
        limits = [*self._limits, *[None] * len(values)]
        chosen = [bucket(v, limit) for v, limit in zip(values, limits)]
        if room is not None:
            most = [n if limit is None else min(n, limit) for n, limit in zip(room, limits)]
            chosen = [max(b, bucket(n, limit)) for b, n, limit in zip(chosen, most, limits)]
        for size in sorted(sizes, key=repr):
            while not size.is_static and size.value(values) > size.bound(chosen):
                smallest = min(size.symbols, key=lambda s: chosen[s])
                chosen[smallest] = bucket(chosen[smallest] + 1)
        return tuple(chosen)

    def padded_sizes(self, segment: Segment, arrays: Sequence[Any]) -> list[int]:
        """For each symbol the largest size to which an input is padded already; 0 for none."""
        assert self.fit is not None
        largest = [0] * len(self.fit.symbols)
        for slot, array in zip(segment.inputs(), arrays):
            if not isinstance(array, PaddedArray):
                continue
            for size, padded in zip(self.shape(slot), array.array.shape):
                if size.scale == 1 and len(size.symbols) == 1:
                    (symbol,) = size.symbols
                    largest[symbol] = max(largest[symbol], padded)
        return largest

    def bound(self, slot: int, buckets: Sequence[int]) -> tuple[int, ...]:
        """Shape of a value's array between programs."""
        return tuple(s.bound(buckets) for s in self.shape(slot))

    def segment(self) -> Segment:
        """The first recording's segment, with the numbers that vary as run-time inputs."""
        first = self.recordings[0].segment
        return replace(self._numbered(first), donated=reused(first))

    def lower(self, buckets: tuple[int, ...]) -> bytes:
        """StableHLO bytecode of the program for some buckets; its last argument are the sizes.

        Raises:
            NotPaddableError: An op cannot run on padded arrays.
        """
        assert self.fit is not None
        segment, ops = self.segment(), self._ops()
        if not self._traces:
            segments = [self._numbered(r.segment) for r in self.recordings]
            self._traces = padded_module.traces(segments, ops.tables)
        tables = [(sizes, t.dtype) for sizes, t in zip(ops.table_sizes(), ops.tables[0])]
        slots = {i: self.shape(i) for i in (*segment.inputs(), *segment.live)}
        return padded_module.lower(segment, self.fit, self._traces, tables, buckets, slots)

    def tables(self, values: Sequence[int], buckets: Sequence[int]) -> list[Table]:
        """Tables of the ops at some sizes, as inputs of the program for some buckets."""
        return self._ops().padded_tables(values, buckets)


def _same(a: float | int, b: float | int) -> bool:
    """Return whether two numbers are the same constant: 0.0 is not -0.0, nor 1 the same as 1.0."""
    return type(a) is type(b) and repr(a) == repr(b)
