"""Families of segments with dynamic sizes: the buckets whose programs serve them."""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from tpu_core.errors import NotPaddableError
from tpu_core.extend import BuildContext, PaddedPrograms, Program, Segment, package_digest
from tpu_eager.bucketing.bucket_choice import BucketChoice
from tpu_eager.bucketing.family import Family, place_of

logger = logging.getLogger("tpu_core")  # whose level is TPU_LOG

# A program with many sizes is one family; what is not seen again must not fill memory.
_MOST_FAMILIES = 256


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _locked(method: _Method) -> _Method:
    """A method of `Families` for one thread at a time."""

    @functools.wraps(method)
    def locked(self: Families, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(_Method, locked)


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
        self._choice = BucketChoice(context, self._padded)
        self._families: OrderedDict[str, Family] = OrderedDict()
        self._outlines: OrderedDict[str, list[str]] = OrderedDict()  # keys of each outline
        self._divided: set[str] = set()  # forms with a family for each place in the user's program
        self._unread: list[tuple[Segment, Program]] = []  # remembered, in no family yet
        self._asked: set[str] = set()  # forms whose family was looked for in the cache

    @_locked
    def remember(self, s: Segment, program: Program) -> None:
        """Take note of a segment that runs as it was recorded."""
        # Describing a training step takes as long as recording it, and many processes run but one.
        self._unread.append((s, program))

    @_locked
    def observe(self, s: Segment) -> None:
        """Take note of the sizes of a segment that runs without a program."""
        self._read()
        family = self._families.get(self._key(s)) or self._new(s, Family(self._padded.new(s)))
        self._padded.observe(family.bucketed, s)
        self._bound(s)

    @_locked
    def is_new(self, s: Segment) -> bool:
        """Return whether nothing is known of the sizes of a segment's form."""
        self._read()
        return self._key(s) not in self._families

    @_locked
    def learn(self, s: Segment) -> bool:
        """Take note of the sizes of a segment that no program serves.

        Returns:
            Whether they are new to its form: its first ones, or others than those known so far had
            let expect.
        """
        self._read()
        family = self._families.get(self._key(s))
        if family is None:
            self.observe(s)
            return True
        bucketed = family.bucketed
        integers = self._padded.integers(s)
        if family.promotion.own(s.key) or bucketed.refusal:
            return False
        if bucketed.solve(s, integers, learns=False) is not None:
            return False
        if bucketed.solve(s, integers) is not None:
            return True
        return self._divide(s, family) and self.learn(s)

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for s, program in unread:
            if not self._padded.has_lost_graphs(s):
                self._add(s, program)

    def _add(self, s: Segment, program: Program) -> None:
        key = self._key(s)
        family = self._families.get(key) or self._new(s, Family(self._padded.new(s)))
        self._bound(s)
        if family.promotion.own(s.key):
            return
        family.is_of_others = False
        self._padded.add(family.bucketed, s, program)

    def _bound(self, s: Segment) -> None:
        """Count a segment's family as the latest, and leave out the oldest."""
        self._families.move_to_end(self._key(s))
        while len(self._families) > _MOST_FAMILIES:
            self._families.popitem(last=False)

    def _new(self, s: Segment, family: Family) -> Family:
        key = self._key(s)
        self._families[key] = family
        keys = self._outlines.setdefault(self._padded.outline(s), [])
        keys[:] = [k for k in keys if k in self._families and k != key] + [key]
        while len(self._outlines) > _MOST_FAMILIES:
            self._outlines.popitem(last=False)
        return family

    @_locked
    def form(self, s: Segment) -> str:
        """Digest of a segment without its sizes."""
        return self._padded.form(s)

    def _key(self, s: Segment) -> str:
        form = self.form(s)
        return f"{form} {place_of(s)}" if form in self._divided else form

    def _divide(self, s: Segment, family: Family) -> bool:
        """Give each place in the user's program a family, where segments of several do not agree.

        Two lines with the same ops may relate their sizes in other ways: one pads in front and the
        other behind.

        Returns:
            Whether the segment and the family's recordings are of several places.
        """
        recordings = family.bucketed.recordings
        places = {place_of(r.segment) for r in recordings}
        if not places - {place_of(s)}:
            return False
        del self._families[self._key(s)]
        if len(self._divided) >= _MOST_FAMILIES:
            self._divided.clear()
        self._divided.add(self.form(s))
        if len(places) == 1:  # with its programs
            self._new(recordings[0].segment, family)
        else:
            for recording in recordings:
                if recording.program is not None:
                    self._add(recording.segment, recording.program)
        return True

    @_locked
    def recurs(self, s: Segment) -> bool:
        """Return whether a segment's sizes recur, so that they have a program of their own."""
        family = self._families.get(self._key(s))
        return family is not None and family.promotion.own(s.key) is not None

    @_locked
    def problem(self, s: Segment) -> str | None:
        """Reason that padded arrays do not serve a segment, where that is known."""
        family = self._families.get(self._key(s))
        return family.bucketed.problem if family else None

    @_locked
    def comment(self, s: Segment, why: Any) -> Any:
        """The reason to compile a segment as it is, with why padded arrays do not serve it."""
        self._read()
        family = self._families.get(self._key(s)) if self._families else None
        if family is None:
            difference = self._difference(s)
            text = f"{why.text}; not on padded arrays: {difference}" if difference else why.text
            return replace(why, text=text)
        if own := family.promotion.own(s.key):
            return replace(why, text=own, line=None)
        if problem := family.bucketed.problem:
            return replace(why, text=f"{why.text}; not on padded arrays: {problem}")
        return why

    def _difference(self, s: Segment) -> str | None:
        """The difference of a segment of a new form from the latest one of the same ops."""
        for family in reversed(self._families.values()):
            for recording in family.bucketed.recordings[-1:]:
                if difference := PaddedPrograms.form_difference(recording.segment, s):
                    return difference
        return None

    @_locked
    def serve(
        self, s: Segment, arrays: list[Any], compiles: bool = True, is_piece: bool = False
    ) -> Program | None:
        """A padded program for the segment, or None where it is to run as it was recorded.

        Args:
            s: The segment.
            arrays: Its inputs.
            compiles: Whether one may be compiled, and sizes that do not follow those known so far
                change what is known.
            is_piece: Whether it is one op of a segment that runs op by op: until the whole has a
                program, any that is there will do.
        """
        self._read()
        if self._is_exact(s):
            return None
        family = self._families.get(self._key(s)) or self._synthetic(s) or self._restored(s)
        if family is not None and family.promotion.own(s.key):
            return None
        if family is None or family.bucketed.refusal:
            return self._serve_by_outline(s, arrays)
        bucketed = family.bucketed
        # The programs for few sizes are few; those for many have many combinations of buckets.
        if not is_piece:
            compiles = compiles or (bool(bucketed.programs) and bucketed.has_few_sizes())
        integers = self._padded.integers(s)
        values = bucketed.solve(s, integers, learns=False)
        if values is None and (program := self._serve_by_outline(s, arrays)):
            return program
        if values is None and compiles:
            # What is known of one place is not made less by what another one records.
            if len(bucketed.recordings) > 1 and self._divide(s, family):
                return self.serve(s, arrays)
            values = bucketed.solve(s, integers)
            if values is None and self._divide(s, family):
                return self.serve(s, arrays)
        if values is None:
            return None
        try:
            return self._program(family, s, values, arrays, compiles, is_piece)
        except NotPaddableError as error:
            if self._divide(s, family):
                return self.serve(s, arrays, compiles, is_piece)
            self._refuse(family, s, error)
        return None

    @_locked
    def serves(self, s: Segment) -> bool:
        """Return whether a program that is there serves a segment."""
        self._read()
        family = self._families.get(self._key(s)) or self._restored(s)
        if family is None or family.bucketed.refusal or not family.bucketed.has_programs():
            return False
        values = family.bucketed.solve(s, self._padded.integers(s), learns=False)
        if values is None:
            return False
        wanted = family.bucketed.buckets(values)
        return any(
            all(x >= y for x, y in zip(buckets, wanted))
            for buckets in (*family.bucketed.programs, *family.bucketed.stored())
        )

    def _is_exact(self, s: Segment) -> bool:
        """Return whether a segment has its own program, and nothing is known of its sizes."""
        if self._families or self._padded.has_graphs(s):
            return False
        return self._context.is_stored(self._context.exact_key(s))

    def _restored(self, s: Segment) -> Family | None:
        """The family of an earlier process, for a segment that has no program of its own."""
        if self._context.is_stored(self._context.exact_key(s)):
            return None
        bucketed = self._stored(s)
        return None if bucketed is None else self._new(s, Family(bucketed, is_of_others=True))

    def _stored(self, s: Segment) -> Any:
        """The sizes that an earlier process knew of the segment's form, or None; asked once."""
        form = self.form(s)
        if form in self._asked or form in self._divided:
            return None
        self._asked.add(form)
        return self._padded.stored(s)

    def _synthetic(self, s: Segment) -> Family | None:
        """A family of one segment, where the graphs in it say which of its sizes vary."""
        bucketed = self._padded.synthetic(s)
        if bucketed is None:
            return None
        return self._new(s, Family(bucketed))

    def _serve_by_outline(self, s: Segment, arrays: list[Any]) -> Program | None:
        """A program of a family of another form that serves the segment as well."""
        own, place = self._key(s), place_of(s)
        for key in self._outlines.get(self._padded.outline(s), ()):
            family = self._families.get(key)
            if key == own or family is None or family.bucketed.refusal:
                continue
            bucketed = family.bucketed
            if bucketed.form in self._divided and place_of(bucketed.segment()) != place:
                continue
            if family.promotion.own(s.key):
                continue
            values = bucketed.solve_outline(s, self._padded.integers(s))
            if values is None:
                continue
            try:
                # Its programs are there; another one would be no less than the segment's own.
                program = self._program(family, s, values, arrays, compiles=False)
            except NotPaddableError as error:  # one of the cache fails its check
                self._refuse(family, s, error)
                continue
            if program is not None:
                return program
        return None

    def _refuse(self, family: Family, s: Segment, error: NotPaddableError) -> None:
        """Take note that a family cannot run on padded arrays."""
        bucketed = family.bucketed
        self._refused(s, error.op or bucketed.differing_op())
        bucketed.refuse(f"{error.op or 'the segment'}: {error}")
        if bucketed.refusal:
            logger.info(
                "Sizes change, but the program cannot run on padded arrays, so each new size is "
                "compiled: %s",
                bucketed.refusal,
            )

    def _program(
        self,
        family: Family,
        s: Segment,
        values: list[int],
        arrays: list[Any],
        compiles: bool,
        is_piece: bool = False,
    ) -> Program | None:
        bucketed, promotion = family.bucketed, family.promotion
        wanted = bucketed.buckets(values)
        buckets = self._choice.buckets(family, s, values, wanted, arrays, is_piece)
        if buckets is None:
            return None
        if buckets not in bucketed.programs:
            if not self._choice.is_stored(family, s, buckets):
                if stored := self._stored(s):
                    family.bucketed = stored
                    return self.serve(s, arrays, compiles, is_piece)
                if not compiles or family.is_of_others:
                    return None
            made = self._padded.obtain(bucketed, s, values, buckets, arrays)
            bucketed.programs[buckets] = made
            if bucketed.form not in self._divided:
                self._padded.save(bucketed)

        def padding() -> float:
            # Sizes may be known better by then, and these buckets be of others.
            known = family.bucketed is bucketed
            return self._choice.waste(family, tuple(values), buckets) if known else 0.0

        counter = promotion.counter(s.key, values, buckets, padding)
        # Not later, for the same reason.
        waste = self._choice.waste(family, wanted, buckets)

        def gives_way(arguments: list[Any]) -> bool:
            if is_piece:
                return False
            if counter.due(arguments, self._context.may_compile):
                return True
            if wanted != buckets:
                if self._choice.has_better(family, wanted, waste):
                    return True
                promotion.count_in(wanted, waste)
            return False

        return self._padded.program(bucketed, s, values, buckets, gives_way)
