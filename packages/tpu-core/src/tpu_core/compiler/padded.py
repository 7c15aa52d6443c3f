"""Programs for segments with dynamic sizes: one executable per bucket of sizes."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from tpu_core.cache.store import ExecutableStore
from tpu_core.cache.tiers import TieredStore
from tpu_core.compiler.reasons import Reason
from tpu_core.compiler.segment import Segment
from tpu_core.metrics import METRICS
from tpu_core.padding.arrays import PaddedArray, fitted
from tpu_core.padding.bucketed_program import BucketedProgram, Recording
from tpu_core.padding.check import differences
from tpu_core.padding.recording import describe
from tpu_core.padding.segment_signature import SegmentSignatures
from tpu_core.padding.sizes import NotPaddableError
from tpu_core.padding.synthetic import has_graphs, synthesize
from tpu_core.pjrt import client as pjrt

if TYPE_CHECKING:
    from tpu_core.compiler.programs import Program, ProgramBuilder

logger = logging.getLogger("tpu_core")

# A program with many sizes is one family; what is not seen again must not fill memory.
_MOST_FAMILIES = 256
# Executables of one family, beyond which a new one serves the sizes of all others too.
_MOST_DISJOINT = 3
# Executables of one family; beyond, a larger bucket serves or the segment runs as it is.
_MOST_PROGRAMS = 16


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _locked(method: _Method) -> _Method:
    """A method of `PaddedPrograms` for one thread at a time."""

    @functools.wraps(method)
    def locked(self: PaddedPrograms, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(_Method, locked)


class PaddedPrograms:
    """Finds or makes padded programs for segments that differ from earlier ones in sizes alone.

    Args:
        builder: Compiles.
        client: The PJRT client.
        store: The cache beyond this process, or None.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        client: pjrt.Client,
        store: ExecutableStore | TieredStore | None,
    ) -> None:
        # What is known of a family changes in several steps, and with it what its programs compute.
        self._lock = threading.RLock()
        self._builder = builder
        self._client = client
        self._signatures = SegmentSignatures(store, builder.key)
        self._families: OrderedDict[str, BucketedProgram] = OrderedDict()
        self._described: tuple[Segment, str, list[int], int] | None = None
        self._unread: list[tuple[Segment, Program]] = []  # remembered, in no family yet

    def _describe(self, s: Segment) -> tuple[str, list[int], int]:
        if self._described is None or self._described[0] is not s:
            self._described = (s, *describe(s))
        return self._described[1:]

    @_locked
    def remember(self, s: Segment, program: Program) -> None:
        """Take note of a segment that runs as it was recorded."""
        # Describing a training step takes as long as recording it, and many processes run but one.
        self._unread.append((s, program))

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for s, program in unread:
            self._add(s, program)

    def _add(self, s: Segment, program: Program) -> None:
        form, integers, tensors = self._describe(s)
        family = self._families.setdefault(form, BucketedProgram(self._signatures, tensors))
        self._families.move_to_end(form)
        if family.promotion.own(s.key):
            return
        family.add(Recording(s, integers, program))
        while len(self._families) > _MOST_FAMILIES:
            self._families.popitem(last=False)

    @_locked
    def form(self, s: Segment) -> str:
        """Digest of a segment without its sizes."""
        return self._describe(s)[0]

    @_locked
    def recurs(self, s: Segment) -> bool:
        """Return whether a segment's sizes recur, so that they have a program of their own."""
        family = self._families.get(self._describe(s)[0])
        return family is not None and family.promotion.own(s.key) is not None

    @_locked
    def problem(self, s: Segment) -> str | None:
        """Reason that padded arrays do not serve a segment, where that is known."""
        family = self._families.get(self._describe(s)[0])
        return family.problem if family else None

    @_locked
    def comment(self, s: Segment, why: Reason) -> Reason:
        """The reason to compile a segment as it is, with why padded arrays do not serve it."""
        self._read()
        family = self._families.get(self._describe(s)[0]) if self._families else None
        if family is None:
            return why
        if family.problem:
            why = Reason(f"{why.text}; not on padded arrays: {family.problem}", why.line)
        return family.promotion.own(s.key) or why

    @_locked
    def serve(self, s: Segment, arrays: list[Any], compiles: bool = True) -> Program | None:
        """A padded program for the segment, or None where it is to run as it was recorded.

        Args:
            s: The segment.
            arrays: Its inputs.
            compiles: Whether one may be compiled, and sizes that do not follow those known so far
                change what is known.
        """
        self._read()
        if not self._families and not has_graphs(s):
            return None
        form, integers, tensors = self._describe(s)
        family = self._families.get(form) or self._synthetic(form, s, tensors)
        if family is None or family.refusal or family.promotion.own(s.key):
            return None
        # The programs for few sizes are few; those for many have many combinations of buckets.
        compiles = compiles or (bool(family.programs) and family.has_few_sizes())
        values = family.solve(s, integers, learns=compiles)
        if values is None:
            return None
        try:
            return self._program(family, form, s, values, arrays, compiles)
        except NotPaddableError as error:
            self._builder.limit.refused(s, error.op or family.differing_op())
            family.refuse(f"{error.op or 'the segment'}: {error}")
        if family.refusal:
            logger.info(
                "Sizes change, but the program cannot run on padded arrays, so each new size is "
                "compiled: %s",
                family.refusal,
            )
        return None

    def _synthetic(self, form: str, s: Segment, tensors: int) -> BucketedProgram | None:
        """A family of one segment, where the graphs in it say which of its sizes vary."""
        synthetic = synthesize(s)
        if synthetic is None:
            return None
        recordings = [Recording(x, describe(x)[1], None) for x in synthetic.segments]
        family = self._families[form] = BucketedProgram.from_synthetic(
            synthetic, recordings, self._signatures, tensors
        )
        return family

    def _program(
        self,
        family: BucketedProgram,
        form: str,
        s: Segment,
        values: list[int],
        arrays: list[Any],
        compiles: bool,
    ) -> Program | None:
        wanted = family.buckets(values)
        buckets = self._buckets(family, form, s, values, wanted)
        if buckets is None:
            return None
        if buckets not in family.programs and not compiles:
            if not self._builder.is_stored(self._key(family, form, s, buckets)):
                return None
        template = family.segment()
        if buckets not in family.programs:
            family.programs[buckets] = self._obtain(family, form, s, values, buckets, arrays)
        executable, key = family.programs[buckets]
        run = self._runner(family, s, buckets, executable)
        counter = family.promotion.counter(s.key, values, buckets)
        shapes = [s.slots[i].shape for i in s.live]

        def execute(arguments: list[Any]) -> list[Any] | None:
            if counter.due(arguments, self._builder.may_compile):
                return None
            if wanted != buckets:
                if self._has_better(family, wanted, buckets):
                    return None
                family.promotion.count_in(wanted, buckets)
            METRICS.padded_execution()
            return run(arguments, values, shapes)

        program = self._builder.program(s, executable, key)
        mask = [n.compiled_in for n in template.numbers]
        return replace(program, execute=execute, handlers=None, compiled_in=mask)

    def _obtain(
        self,
        family: BucketedProgram,
        form: str,
        s: Segment,
        values: list[int],
        buckets: tuple[int, ...],
        arrays: list[Any],
    ) -> tuple[pjrt.Loaded, str]:
        """An executable for some buckets, and its key.

        Raises:
            NotPaddableError: An op cannot run on padded arrays, or does not do so as it should.
        """
        outputs = [(family.bound(i, buckets), s.slots[i].dtype) for i in s.live]
        key = self._key(family, form, s, buckets)

        def check(loaded: pjrt.Loaded) -> None:
            run = self._runner(family, s, buckets, loaded)
            problem = differences(family, buckets, run, arrays, self._client.devices[s.device])
            if problem:
                raise NotPaddableError(problem)

        sizes = ", ".join(f"{v} in {b}" for v, b in zip(values, buckets))
        why = self._builder.explain(s)
        reason = Reason(f"{why.text}; on padded arrays from now on ({sizes})", why.line)
        loaded = self._builder.obtain(s, key, lambda: family.lower(buckets), outputs, reason, check)
        self._builder.remember(s)
        return loaded, key

    def _key(self, family: BucketedProgram, form: str, s: Segment, buckets: tuple[int, ...]) -> str:
        constants = family.segment().constants()
        return self._builder.key(s, f"{form} {family.signature()} {buckets}", constants)

    def _buckets(
        self,
        family: BucketedProgram,
        form: str,
        s: Segment,
        values: Sequence[int],
        wanted: tuple[int, ...],
    ) -> tuple[int, ...] | None:
        """The buckets of the program to use, of which there need be none yet.

        A larger program serves until it has cost as much as many runs: a compile takes as long as
        hundreds of them.
        """
        if not family.programs:
            # Large enough for the recordings too: on one of them the program is checked.
            assert family.fit is not None
            pairs = zip(family.recordings, family.fit.values)
            known = next((v for r, v in pairs if r.program), values)
            return family.buckets([max(pair) for pair in zip(values, known)])
        larger = [b for b in family.programs if all(x >= y for x, y in zip(b, wanted))]
        nearest = min(larger, key=math.prod, default=None)
        if nearest is None:
            if len(family.programs) < _MOST_DISJOINT:
                return wanted
            # One that serves all sizes so far: the buckets of several sizes have many combinations.
            wider = tuple(map(max, zip(wanted, *family.programs)))
            return wider if len(family.programs) < _MOST_PROGRAMS else None
        if self._has_better(family, wanted, nearest):
            return wanted
        has_room = len(family.programs) < _MOST_PROGRAMS
        if has_room and self._builder.is_stored(self._key(family, form, s, wanted)):
            return wanted
        return nearest

    def _has_better(
        self, family: BucketedProgram, wanted: tuple[int, ...], used: tuple[int, ...]
    ) -> bool:
        """Return whether a program of buckets that fit better is there, or worth a compile now."""
        if wanted in family.programs:
            return True
        return (
            len(family.programs) < _MOST_PROGRAMS
            and self._builder.may_compile
            and family.promotion.outgrew(wanted, used, len(family.programs))
        )

    def _runner(
        self, family: BucketedProgram, s: Segment, buckets: tuple[int, ...], loaded: pjrt.Loaded
    ) -> Any:
        device = self._client.devices[s.device]
        inputs = [family.bound(i, buckets) for i in s.inputs()]
        outputs = [family.bound(i, buckets) for i in s.live]

        def run(
            arguments: list[Any], values: Sequence[int], shapes: Sequence[tuple[int, ...]]
        ) -> list[Any]:
            padded = [fitted(a, shape, device) for a, shape in zip(arguments, inputs)]
            sizes = pjrt.put_numbers(2, np.asarray(values, np.int32).tobytes(), device)
            sharded = loaded.execute([*padded, *arguments[len(inputs) :], sizes])
            results = sharded.consume_with_handlers(loaded.handlers)
            return [
                r if shape == bound else PaddedArray(r, shape)
                for r, shape, bound in zip(results, shapes, outputs)
            ]

        return run
