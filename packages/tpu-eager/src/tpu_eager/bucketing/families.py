"""Families of segments with dynamic sizes: the buckets whose programs serve them."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from tpu_core.config import config
from tpu_core.errors import NotPaddableError
from tpu_core.extend import BuildContext, PaddedPrograms, Program, Segment, package_digest
from tpu_eager.bucketing.promotion import PromotionPolicy
from tpu_eager.costs import compile_seconds, run_seconds

logger = logging.getLogger("tpu_core")  # whose level is TPU_LOG

# A program with many sizes is one family; what is not seen again must not fill memory.
_MOST_FAMILIES = 256
# Executables of one family, beyond which a new one serves the sizes of all others too.
_MOST_DISJOINT = 3
# Executables of one family; beyond, a larger bucket serves or the segment runs as it is.
_MOST_PROGRAMS = 16
# Buckets have room for sizes that are this much larger, and for all small ones,
_ROOM = 1.5
_LEAST = 32
# where so many runs on what is not needed take less time than the compile that they may save.
_RUNS = 50
# Wasted runs of a compiled graph that take as long as its compile.
_WASTED_RUNS = 8


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _locked(method: _Method) -> _Method:
    """A method of `Families` for one thread at a time."""

    @functools.wraps(method)
    def locked(self: Families, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(_Method, locked)


@dataclass(slots=True)
class _Family:
    """A program with many sizes, and those that are to have programs of their own."""

    bucketed: Any  # of `PaddedPrograms`
    promotion: PromotionPolicy = field(default_factory=PromotionPolicy)
    _seconds: dict[tuple[str, tuple[int, ...]], float] = field(default_factory=dict)

    def waste(self, wanted: tuple[int, ...], used: tuple[int, ...], is_cpu: bool) -> float:
        """The part of the compile of a better program that a run in larger buckets wastes."""
        segment = self.bucketed.segment()
        if PaddedPrograms.has_graphs(segment):  # whose intermediate values are not known
            return (1 - math.prod(wanted) / math.prod(used)) / _WASTED_RUNS
        more = self._run_seconds(used, is_cpu) - self._run_seconds(wanted, is_cpu)
        return more / compile_seconds(segment.nodes)

    def _run_seconds(self, buckets: tuple[int, ...], is_cpu: bool) -> float:
        bucketed = self.bucketed
        key = (bucketed.signature(), buckets)
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = run_seconds(bucketed.segment(), lambda i: bucketed.bound(i, buckets), is_cpu)
            self._seconds[key] = seconds
        return seconds


class Families:
    """Finds or makes padded programs for segments that differ from earlier ones in sizes alone.

    Args:
        context: The client's.
        refused: Called with a segment and the label of an op of it that padded arrays do not serve.
    """

    def __init__(self, context: BuildContext, refused: Callable[[Segment, str], None]) -> None:
        # What is known of a family changes in several steps, and with it what its programs compute.
        self._lock = threading.RLock()
        self._context = context
        self._refused = refused
        self._padded = PaddedPrograms(context, package_digest("tpu_eager"))
        self._is_cpu = context.client.platform.name == "cpu"
        self._families: OrderedDict[str, _Family] = OrderedDict()
        self._unread: list[tuple[Segment, Program]] = []  # remembered, in no family yet

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
        form = self._padded.form(s)
        if form not in self._families:
            self._families[form] = _Family(self._padded.new(s))
        family = self._families[form]
        self._families.move_to_end(form)
        if family.promotion.own(s.key):
            return
        self._padded.add(family.bucketed, s, program)
        while len(self._families) > _MOST_FAMILIES:
            self._families.popitem(last=False)

    @_locked
    def form(self, s: Segment) -> str:
        """Digest of a segment without its sizes."""
        return self._padded.form(s)

    @_locked
    def recurs(self, s: Segment) -> bool:
        """Return whether a segment's sizes recur, so that they have a program of their own."""
        family = self._families.get(self.form(s))
        return family is not None and family.promotion.own(s.key) is not None

    @_locked
    def problem(self, s: Segment) -> str | None:
        """Reason that padded arrays do not serve a segment, where that is known."""
        family = self._families.get(self.form(s))
        return family.bucketed.problem if family else None

    @_locked
    def comment(self, s: Segment, why: Any) -> Any:
        """The reason to compile a segment as it is, with why padded arrays do not serve it."""
        self._read()
        family = self._families.get(self.form(s)) if self._families else None
        if family is None:
            return why
        if own := family.promotion.own(s.key):
            return replace(why, text=own, line=None)
        if problem := family.bucketed.problem:
            return replace(why, text=f"{why.text}; not on padded arrays: {problem}")
        return why

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
        if not self._families and not self._padded.has_graphs(s):
            return None
        family = self._families.get(self.form(s)) or self._synthetic(s)
        if family is None or family.bucketed.refusal or family.promotion.own(s.key):
            return None
        bucketed = family.bucketed
        # The programs for few sizes are few; those for many have many combinations of buckets.
        compiles = compiles or (bool(bucketed.programs) and bucketed.has_few_sizes())
        values = bucketed.solve(s, self._padded.integers(s), learns=compiles)
        if values is None:
            return None
        try:
            return self._program(family, s, values, arrays, compiles)
        except NotPaddableError as error:
            self._refused(s, error.op or bucketed.differing_op())
            bucketed.refuse(f"{error.op or 'the segment'}: {error}")
        if bucketed.refusal:
            logger.info(
                "Sizes change, but the program cannot run on padded arrays, so each new size is "
                "compiled: %s",
                bucketed.refusal,
            )
        return None

    def _synthetic(self, s: Segment) -> _Family | None:
        """A family of one segment, where the graphs in it say which of its sizes vary."""
        bucketed = self._padded.synthetic(s)
        if bucketed is None:
            return None
        family = self._families[self.form(s)] = _Family(bucketed)
        return family

    def _program(
        self, family: _Family, s: Segment, values: list[int], arrays: list[Any], compiles: bool
    ) -> Program | None:
        bucketed, promotion = family.bucketed, family.promotion
        wanted = bucketed.buckets(values)
        buckets = self._buckets(family, s, values, wanted, arrays)
        if buckets is None:
            return None
        if buckets not in bucketed.programs:
            if not compiles and not self._is_stored(family, s, buckets):
                return None
            made = self._padded.obtain(bucketed, s, values, buckets, arrays)
            bucketed.programs[buckets] = made
        counter = promotion.counter(s.key, values, buckets)
        # Not later: sizes may be known better then, and these buckets be of others.
        waste = family.waste(wanted, buckets, self._is_cpu) if wanted != buckets else 0.0

        def gives_way(arguments: list[Any]) -> bool:
            if counter.due(arguments, self._context.may_compile):
                return True
            if wanted != buckets:
                if self._has_better(family, wanted, waste):
                    return True
                promotion.count_in(wanted, waste)
            return False

        return self._padded.program(bucketed, s, values, buckets, gives_way)

    def _is_stored(self, family: _Family, s: Segment, buckets: tuple[int, ...]) -> bool:
        return self._context.is_stored(self._padded.key(family.bucketed, s, buckets))

    def _buckets(
        self,
        family: _Family,
        s: Segment,
        values: Sequence[int],
        wanted: tuple[int, ...],
        arrays: Sequence[Any],
    ) -> tuple[int, ...] | None:
        """The buckets of the program to use, of which there need be none yet.

        A larger program serves until it has cost as much as many runs: a compile takes as long as
        hundreds of them.
        """
        bucketed = family.bucketed
        programs = bucketed.programs
        if not programs:
            # Large enough for the recordings too: on one of them the program is checked.
            assert bucketed.fit is not None
            pairs = zip(bucketed.recordings, bucketed.fit.values)
            known = next((v for r, v in pairs if r.program), values)
            return self._with_room(family, s, [max(pair) for pair in zip(values, known)], arrays)
        larger = [b for b in programs if all(x >= y for x, y in zip(b, wanted))]
        nearest = min(larger, key=math.prod, default=None)
        if nearest is None:
            if len(programs) >= _MOST_PROGRAMS:
                return None
            # One that serves all sizes so far: the buckets of several sizes have many combinations.
            roomy = self._with_room(family, s, values, arrays)
            wider = tuple(map(max, zip(roomy, *programs)))
            if len(programs) >= _MOST_DISJOINT or self._is_cheap(family, wider, wanted):
                return wider
            return roomy
        if self._has_better(family, wanted, family.waste(wanted, nearest, self._is_cpu)):
            return wanted
        if len(programs) < _MOST_PROGRAMS and self._is_stored(family, s, wanted):
            return wanted
        return nearest

    def _with_room(
        self, family: _Family, s: Segment, values: Sequence[int], arrays: Sequence[Any]
    ) -> tuple[int, ...]:
        """Buckets for some sizes, and for somewhat larger ones where that costs little."""
        bucketed = family.bucketed
        wanted: tuple[int, ...] = bucketed.buckets(values)
        if config().buckets:  # the user's
            return wanted
        chosen = wanted
        # An array with other padding goes by way of the host.
        padded = bucketed.padded_sizes(s, arrays)
        for room in (lambda n: math.ceil(_ROOM * n), lambda n: _LEAST):
            for i, value in enumerate(values):
                # What fills its bucket may be the weights, which have no padding in any run.
                if value == wanted[i] and not padded[i]:
                    continue
                larger = list(chosen)
                larger[i] = max(chosen[i], padded[i] or room(value))
                roomy = bucketed.buckets(values, larger)
                if self._is_cheap(family, roomy, wanted):
                    chosen = roomy
        return chosen

    def _is_cheap(self, family: _Family, buckets: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        """Return whether runs in larger buckets cost little beside another compile."""
        return family.waste(wanted, buckets, self._is_cpu) * _RUNS <= 1

    def _has_better(self, family: _Family, wanted: tuple[int, ...], waste: float) -> bool:
        """Return whether a program of buckets that fit better is there, or worth a compile now."""
        programs = family.bucketed.programs
        if wanted in programs:
            return True
        return (
            len(programs) < _MOST_PROGRAMS
            and self._context.may_compile
            and family.promotion.outgrew(wanted, waste, len(programs))
        )
