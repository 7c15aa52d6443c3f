"""A family of segments with dynamic sizes, and what its programs waste."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tpu_core.extend import PaddedPrograms, Segment
from tpu_eager.bucketing.promotion import PromotionPolicy
from tpu_eager.costs import compile_seconds, run_seconds

# Wasted runs of a compiled graph that take as long as its compile.
_WASTED_RUNS = 8


def place_of(s: Segment) -> int:
    """The lines of the user's program that recorded a segment."""
    return hash(tuple(node.line for node in s.nodes))


@dataclass(slots=True)
class Family:
    """A program with many sizes, and those that are to have programs of their own.

    Attributes:
        bucketed: The sizes, and the programs on padded arrays.
        promotion: The sizes with programs of their own.
        is_of_others: Whether its sizes varied in other processes alone: here they may not.
    """

    bucketed: Any  # of `PaddedPrograms`
    promotion: PromotionPolicy = field(default_factory=PromotionPolicy)
    is_of_others: bool = False
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
