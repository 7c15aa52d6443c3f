"""Promotion of sizes from a bucketed program to one that fits them better.

A padded program works on more than counts and masks what does not, in every run. A size that a loop
comes back to again and again is worth a compile where its padding has cost as much time; one of
many that come in turn is not. Neither is a bucket of sizes that a larger one serves, before that
has cost as much time as the compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tpu_core.extend import PaddedPrograms

RUNS = 32  # of a size; after them it recurs
WASTE = (
    1.0  # of the time of a compile, by runs in a larger bucket that a smaller one would have saved
)
_CHEAP = 3  # programs of a family that are earned so; each further one by twice as much
_SHARE = 8  # It is at least one of so many runs of its family,
_WASTE = 8  # the padding one part of so many,
_MOST = 4  # and so many others of the family have a program of their own at most.


class PromotionPolicy:
    """The sizes of one family that recur, and those that have a program of their own.

    Example:
        >>> PromotionPolicy().waste([96], [128])
        True
    """

    def __init__(self) -> None:
        self._own: dict[str, str] = {}
        self._runs = 0
        self._wasted: dict[tuple[int, ...], float] = {}

    def own(self, key: str) -> str | None:
        """Reason for an exact program of this key, or None."""
        return self._own.get(key)

    @staticmethod
    def waste(values: Sequence[int], buckets: Sequence[int]) -> bool:
        """Return whether padding to the buckets is much more work."""
        wanted = math.prod(values)
        return (math.prod(buckets) - wanted) * _WASTE >= wanted

    def outgrew(self, wanted: tuple[int, ...], waste: float, programs: int = 1) -> bool:
        """Return whether runs in a larger bucket have cost as much as a program of ``wanted``.

        Args:
            wanted: The buckets of each size.
            waste: The part of the compile that the next run wastes.
            programs: Number of programs of the family. Beyond a few each has to be earned by twice
                the waste of the one before: the buckets of several sizes have many combinations.

        Example:
            >>> PromotionPolicy().outgrew((64,), 0.1)
            False
        """
        limit = WASTE * 2 ** max(programs - _CHEAP, 0)
        return self._wasted.get(wanted, 0.0) + waste > limit

    def count_in(self, wanted: tuple[int, ...], waste: float) -> None:
        """Count a run, in a larger bucket, of what the bucket ``wanted`` is for."""
        self._wasted[wanted] = self._wasted.get(wanted, 0.0) + waste

    def counter(
        self, key: str, values: Sequence[int], buckets: Sequence[int], waste: Callable[[], float]
    ) -> Counter:
        """A counter of the runs of one size.

        Args:
            key: Of the segment in this size.
            values: The sizes.
            buckets: Those of the program that serves them.
            waste: Gives the part of the compile of a program of its own that a run wastes.
        """
        return Counter(self, key, values, buckets, waste)

    def count(self) -> None:
        """Count a run of any size."""
        self._runs += 1

    def often(self, runs: int) -> bool:
        """Return whether a size that has run so often recurs, and may have its own program."""
        return runs > RUNS and runs * _SHARE >= self._runs and len(self._own) < _MOST

    def promote(self, key: str, values: Sequence[int], buckets: Sequence[int]) -> None:
        """Give a size its own program from now on."""
        sizes, padded = (", ".join(map(str, n)) for n in (values, buckets))
        subject = f"size {sizes} recurs: its" if len(values) == 1 else f"sizes {sizes} recur: their"
        self._own[key] = f"{subject} own program instead of one padded to {padded}"


class Counter:
    """Counts the runs of one size of a family."""

    def __init__(
        self,
        family: PromotionPolicy,
        key: str,
        values: Sequence[int],
        buckets: Sequence[int],
        waste: Callable[[], float],
    ) -> None:
        self._family, self._key, self._waste = family, key, waste
        self._padding: float | None = None
        self._values, self._buckets = values, buckets
        self._runs = 0
        self._wastes = family.waste(values, buckets)

    def due(self, arguments: Sequence[Any], may_compile: bool) -> bool:
        """Count a run; whether another program is to take its place.

        Args:
            arguments: Arrays that the program is about to run on.
            may_compile: Whether it can be compiled now.
        """
        self._family.count()
        if not self._wastes:
            return False
        if self._family.own(self._key):
            return may_compile
        # What is padded already would have to lose its padding, by way of the host.
        if any(map(PaddedPrograms.is_padded, arguments)):
            return False
        self._runs += 1
        if not self._family.often(self._runs) or not may_compile:
            return False
        if self._padding is None:
            self._padding = self._waste()
        if self._runs * self._padding < WASTE:
            return False
        self._family.promote(self._key, self._values, self._buckets)
        return True
