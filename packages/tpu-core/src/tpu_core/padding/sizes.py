"""Sizes that vary from one recording of a segment to the next, and those that follow from them.

Two recordings of one program differ in some integers: sizes, strides, offsets, slice bounds. The
first that differ become symbols; every other one must be a `Size` of them:
``scale * product(symbols) + offset``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


class Unpaddable(Exception):
    """A segment cannot run on padded arrays; the text says why.

    Attributes:
        op: The op and user line at fault, ``train.py:31/aten.mm``; empty where it is none's.
    """

    op = ""


@dataclass(frozen=True, slots=True)
class Size:
    """``scale * product(symbols) + offset``; without symbols, the static size ``offset``.

    Example:
        >>> Size(2, (0,), 1).value([10])
        21
    """

    scale: int
    symbols: tuple[int, ...]
    offset: int

    @property
    def is_static(self) -> bool:
        return not self.symbols

    def value(self, values: Sequence[int]) -> int:
        """The size where the symbols have these values."""
        if not self.symbols:
            return self.offset
        return self.scale * math.prod(values[s] for s in self.symbols) + self.offset

    def bound(self, buckets: Sequence[int]) -> int:
        """Its size in arrays between programs, whose symbols are padded to ``buckets``."""
        if not self.symbols:
            return self.offset
        return self.scale * math.prod(buckets[s] for s in self.symbols)


def static(size: int) -> Size:
    """A size that does not vary."""
    return Size(0, (), size)


@dataclass(frozen=True, slots=True)
class Known:
    """A number inside an op: always the same, a size, or one divided by a size.

    Attributes:
        constant: The number, where it is always the same.
        size: The size.
        inverted: It is one divided by the size.
    """

    constant: float | None = None
    size: Size | None = None
    inverted: bool = False

    def holds(self, number: float, values: Sequence[int]) -> bool:
        """Whether it is this number where the symbols have these values."""
        if self.size is None:
            return number == self.constant or (number != number and self.constant != self.constant)
        n = self.size.value(values)
        # A reciprocal is rounded to the dtype of the op.
        return number == n if not self.inverted else abs(number * n - 1) < 3e-3


class Fit:
    """Symbols, and the values that they had in several recordings.

    Args:
        recordings: For each recording its integers, in one order.

    Attributes:
        symbols: For each symbol the position of the integer that defines it.
        values: For each recording the values of the symbols.
        sizes: For each position its `Size`.
    """

    def __init__(self, recordings: Sequence[Sequence[int]]) -> None:
        self.symbols: list[int] = []
        self.values: list[list[int]] = [[] for _ in recordings]
        self.sizes: list[Size] = []
        known: dict[tuple[int, ...], Size] = {}
        for position, seen in enumerate(zip(*recordings, strict=True)):
            if seen not in known:
                size = self.express(seen)
                if size is None:
                    size = Size(1, (len(self.symbols),), 0)
                    self.symbols.append(position)
                    for values, value in zip(self.values, seen):
                        values.append(value)
                known[seen] = size
            self.sizes.append(known[seen])
        self._known = known

    def express(self, seen: Sequence[int]) -> Size | None:
        """The simplest `Size` that has these values, one a recording; None where there is none."""
        if all(v == seen[0] for v in seen):
            return static(seen[0])
        found: list[tuple[tuple[int, int], Size]] = []
        for degree in (1, 2, 3):
            for symbols in itertools.combinations_with_replacement(
                range(len(self.symbols)), degree
            ):
                products = [math.prod(values[s] for s in symbols) for values in self.values]
                line = _line(products, seen)
                if line and (degree == 1 or line[1] == 0):
                    found.append((_likelihood(degree, *line), Size(line[0], symbols, line[1])))
        return min(found, key=lambda x: x[0])[1] if found else None

    def derive(self, seen: Sequence[int]) -> Size | None:
        """As `express`, for integers that are not compared with those of later recordings.

        They must be among those that are, or of a form that is no coincidence.
        """
        seen = tuple(seen)
        if seen in self._known:
            return self._known[seen]
        size = self.express(seen)
        if (
            size is None
            or size.is_static
            or _likelihood(len(size.symbols), size.scale, size.offset)[0] < 4
        ):
            return size
        return None

    def follow(self, seen: Sequence[float]) -> Known | None:
        """What a number is that was ``seen`` in the recordings; None where it follows no size."""
        if all(n == seen[0] or n != n for n in seen):
            return Known(constant=seen[0])
        for inverted in (False, True):
            if not all(math.isfinite(n) and (n or not inverted) for n in seen):
                continue
            integers = [1 / n if inverted else n for n in seen]
            if all(abs(n - round(n)) <= 1e-6 * abs(n) for n in integers):
                size = self.derive([round(n) for n in integers])
                if size is not None:
                    return Known(size=size, inverted=inverted)
        return None

    def solve(self, integers: Sequence[int]) -> list[int] | None:
        """The symbols' values in another recording; None where it does not follow the sizes."""
        if len(integers) != len(self.sizes):
            return None
        values = [integers[position] for position in self.symbols]
        for size, integer in zip(self.sizes, integers):
            if size.value(values) != integer:
                return None
        return values


def _likelihood(degree: int, scale: int, offset: int) -> tuple[int, int]:
    """Rank of a form; any two values lie on a line, so a multiple or a small offset is likelier."""
    if offset == 0:
        return degree, 0
    return (1 if abs(offset) <= 4 * scale else 4), abs(offset)


def _line(xs: Sequence[int], ys: Sequence[int]) -> tuple[int, int] | None:
    """Integers (a, b), a > 0, with y = a * x + b."""
    pair = next(((x, y) for x, y in zip(xs, ys) if x != xs[0]), None)
    if pair is None:
        return None
    a, rest = divmod(pair[1] - ys[0], pair[0] - xs[0])
    b = ys[0] - a * xs[0]
    if rest or a <= 0 or any(a * x + b != y for x, y in zip(xs, ys)):
        return None
    return a, b


def bucket(size: int) -> int:
    """What serves ``size``: the next power of two, or three quarters of it from 96 on."""
    power = 1 << max(size - 1, 0).bit_length()
    return power * 3 // 4 if power >= 128 and size <= power * 3 // 4 else power
