"""Numbers inside ops as expressions of the sizes that vary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tpu_core.padding.sizes import NUMERATORS, Known, Size, identical, static

# Varying sizes beyond which no product of them is looked for.
MOST_FACTORS = 16


class Numbers:
    """Finds the expression of a number from its values in several recordings.

    Args:
        known: The size of each column of values.
        values: For each recording the values of the symbols.
        derive: Gives the size of another column, or None.
    """

    def __init__(
        self,
        known: Mapping[tuple[int, ...], Size],
        values: Sequence[Sequence[int]],
        derive: Callable[[Sequence[int]], Size | None],
    ) -> None:
        self._known, self._values, self._derive = known, values, derive
        self._counts: dict[tuple[int, ...], tuple[tuple[Size, ...], int] | None] = {}

    def follow(self, seen: Sequence[float], dtype: Any) -> Known | None:
        """Expression of a number that was ``seen`` in the recordings; None where it follows no
        size.

        Args:
            seen: The number in each recording.
            dtype: Its dtype, which rounds a quotient.
        """
        if all(identical(n, seen[0]) for n in seen):
            return Known(constant=seen[0])
        if not all(math.isfinite(n) for n in seen):
            return None
        if all(n == round(n) for n in seen):
            count = self._count([round(n) for n in seen])
            if count is not None:
                return Known(factors=count[0], offset=count[1])
        if np.dtype(dtype).kind != "f" or not all(seen):
            return None
        rounded = np.dtype(dtype).name
        for numerator in NUMERATORS:
            count = self._count([round(numerator / n) for n in seen])
            if count is None:
                continue
            factors, offset = count
            known = Known(None, factors, offset, 1, numerator, rounded)
            if all(map(known.holds, seen, self._values)):
                return known
        return self._share(seen, rounded) or self._root(seen, rounded)

    def _root(self, seen: Sequence[float], dtype: str) -> Known | None:
        """One divided by the square root of a count: the scale of attention."""
        count = self._count([round(n**-2) for n in seen]) if min(seen) > 0 else None
        if count is None:
            return None
        known = Known(None, *count, numerator=1, dtype=dtype, root=True)
        return known if all(map(known.holds, seen, self._values)) else None

    def _share(self, seen: Sequence[float], dtype: str) -> Known | None:
        """A size, or the integer next to it, divided by one number: the step of a resize."""
        for column, size in self._known.items():
            if size.is_static:
                continue
            for offset in (0, -1):
                divisor = round((column[0] + offset) / seen[0])
                known = Known(None, (size,), offset, divisor, None, dtype)
                if divisor > 1 and all(map(known.holds, seen, self._values)):
                    return known
        return None

    def _count(self, seen: Sequence[int]) -> tuple[tuple[Size, ...], int] | None:
        """Sizes and the offset to their product that give these integers."""
        seen = tuple(seen)
        if seen not in self._counts:
            size = self._derive(seen)
            self._counts[seen] = self._product(seen) if size is None else ((size,), 0)
        return self._counts[seen]

    def _product(self, seen: tuple[int, ...]) -> tuple[tuple[Size, ...], int] | None:
        """The product of some varying sizes and a static one, or the integer next to it."""
        varying = [(size, column) for column, size in self._known.items() if not size.is_static]
        if len(varying) > MOST_FACTORS:
            return None
        for degree in (2, 3):
            for chosen in itertools.combinations_with_replacement(varying, degree):
                products = [math.prod(row) for row in zip(*(column for _, column in chosen))]
                for offset in (0, -1, 1) if products[0] else ():
                    scale, rest = divmod(seen[0] - offset, products[0])
                    follows = all(n - offset == scale * p for n, p in zip(seen, products))
                    if scale > 0 and not rest and follows:
                        sizes = tuple(size for size, _ in chosen)
                        return (*sizes, static(scale))[: degree + (scale > 1)], offset
        return None
