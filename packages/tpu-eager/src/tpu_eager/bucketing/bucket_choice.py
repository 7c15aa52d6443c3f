"""The choice of buckets: which program serves the sizes of a segment, and which is to be made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tpu_core.config import config
from tpu_core.extend import BuildContext, PaddedPrograms, Segment
from tpu_eager.bucketing.family import Family

# Executables of one family, beyond which a new one serves the sizes of all others too.
_MOST_DISJOINT = 3
# Executables of one family; beyond, a larger bucket serves or the segment runs as it is.
_MOST_PROGRAMS = 16
# Buckets have room for sizes that are this much larger, and for all small ones,
_ROOM = 1.5
_LEAST = 32
# where so many runs on what is not needed take less time than the compile that they may save.
_RUNS = 50


class BucketChoice:
    """Chooses among the programs of a family, and those that it might have.

    Args:
        context: The client's.
        padded: Makes the programs.
    """

    def __init__(self, context: BuildContext, padded: PaddedPrograms) -> None:
        self._context = context
        self._padded = padded
        self._is_cpu = context.client.platform.name == "cpu"

    def is_stored(self, family: Family, s: Segment, buckets: tuple[int, ...]) -> bool:
        """Return whether the cache of this machine has a program."""
        return self._context.is_stored(self._padded.key(family.bucketed, s, buckets))

    def buckets(
        self,
        family: Family,
        s: Segment,
        values: Sequence[int],
        wanted: tuple[int, ...],
        arrays: Sequence[Any],
        is_piece: bool,
    ) -> tuple[int, ...] | None:
        """The buckets of the program to use, of which there need be none yet.

        A larger program serves until it has cost as much as many runs: a compile takes as long as
        hundreds of them.
        """
        bucketed = family.bucketed
        programs = {*bucketed.programs, *bucketed.stored()}
        if not programs:
            # Large enough for the recordings too, on one of which the program is checked.
            largest = [max(column) for column in zip(values, *bucketed.seen())]
            return self._with_room(family, s, largest, arrays)
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
        if is_piece:
            return nearest
        if self.has_better(family, wanted, self.waste(family, wanted, nearest)):
            return wanted
        if len(programs) < _MOST_PROGRAMS and self.is_stored(family, s, wanted):
            return wanted
        return nearest

    def _with_room(
        self, family: Family, s: Segment, values: Sequence[int], arrays: Sequence[Any]
    ) -> tuple[int, ...]:
        """Buckets for some sizes, and for somewhat larger ones where that costs little."""
        bucketed = family.bucketed
        wanted: tuple[int, ...] = bucketed.buckets(values)
        if config().buckets:  # the user's
            return wanted
        chosen = wanted
        rows = [(row, bucketed.buckets(row)) for row in [list(values), *bucketed.seen()]]
        fills = [all(row[i] == most[i] for row, most in rows) for i in range(len(values))]
        # An array with other padding goes by way of the host.
        padded = bucketed.padded_sizes(s, arrays)
        for room in (lambda n: math.ceil(_ROOM * n), lambda n: _LEAST):
            for i, value in enumerate(values):
                # What always fills its bucket may be the weights, which have no padding in any run.
                if fills[i] and not padded[i]:
                    continue
                larger = list(chosen)
                larger[i] = max(chosen[i], padded[i] or room(value))
                roomy = bucketed.buckets(values, larger)
                if self._is_cheap(family, roomy, wanted):
                    chosen = roomy
        return chosen

    def _is_cheap(self, family: Family, buckets: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        """Return whether runs in larger buckets cost little beside another compile."""
        return self.waste(family, wanted, buckets) * _RUNS <= 1

    def waste(self, family: Family, wanted: tuple[int, ...], used: tuple[int, ...]) -> float:
        """The part of the compile of a better program that a run in larger buckets wastes."""
        return family.waste(wanted, used, self._is_cpu) if wanted != used else 0.0

    def has_better(self, family: Family, wanted: tuple[int, ...], waste: float) -> bool:
        """Return whether a program of buckets that fit better is there, or worth a compile now."""
        programs = family.bucketed.programs
        if wanted in programs:
            return True
        return (
            len(programs) < _MOST_PROGRAMS
            and self._context.may_compile
            and family.promotion.outgrew(wanted, waste, len(programs))
        )
