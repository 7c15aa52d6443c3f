"""Dynamic sizes: those that change between recordings of a segment, and those derived.

Two recordings of one program differ in some integers. Sizes of tensors come first, then their
strides and offsets, and may vary: the first that differ become symbols. Every other integer (an
argument that is declared a size) must be a `Size` of them: ``scale * product(symbols) + offset``,
or the rest that a symbol leaves of a static size.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_core.config import config
from tpu_core.errors import NotPaddableError as NotPaddableError


@dataclass(frozen=True, slots=True)
class Size:
    """``scale * product(symbols) + offset``; without symbols, the static size ``offset``.

    A scale of -1 is the rest of a static size, as the padding up to it: the offset is the most.

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

    def value(self, values: Sequence[Any]) -> Any:
        """The size where the symbols have these values: integers or symbolic dims."""
        if not self.symbols:
            return self.offset
        return self.scale * math.prod(values[s] for s in self.symbols) + self.offset

    def bound(self, buckets: Sequence[int]) -> int:
        """Its size in arrays between programs, whose symbols are padded to ``buckets``."""
        if not self.symbols or self.scale < 0:
            return self.offset
        return self.scale * math.prod(buckets[s] for s in self.symbols)


def static(size: int) -> Size:
    """A size that does not vary."""
    return Size(0, (), size)


# What a size may divide to give a number: one (a mean), or two (the gradient of a variance).
NUMERATORS = (1, 2)


# Varying sizes beyond which no product of them is looked for.
_MOST_FACTORS = 16
# Most that an offset is for a scale of 1, where a size is likely to be another with an offset.
_SMALL = 4
# Scale and offset of a bound that lies next to a number of elements, as a limit of indices does.
_NEXT_TO_PRODUCTS = ((1, 1), (1, -1))


@dataclass(frozen=True, slots=True)
class Known:
    """A number inside an op: always the same, a count, a count divided by a number that is always
    the same, or one or two divided by a count.

    A count is a size, or the product of several with a small offset: of the elements of an image
    whose height is a size less 2.

    Attributes:
        constant: The number, where it is always the same.
        factors: The sizes whose product is the count, less its offset.
        offset: Summand beside the product.
        divisor: The number that divides the count.
        numerator: The number that the count divides; None where the count is not the divisor.
        dtype: The quotient's, to which it is rounded.
    """

    constant: float | None = None
    factors: tuple[Size, ...] = ()
    offset: int = 0
    divisor: int = 1
    numerator: int | None = None
    dtype: str = ""

    def holds(self, number: float, values: Sequence[int]) -> bool:
        """Return whether it is this number where the symbols have these values."""
        if not self.factors:
            return identical(number, self.constant)
        n = math.prod(size.value(values) for size in self.factors) + self.offset
        if self.numerator is None and self.divisor == 1:
            return number == n
        if self.numerator is None:  # exactly: a place that is read may follow from it
            return bool(np.dtype(self.dtype).type(n / self.divisor) == number)
        return abs(number * n - self.numerator) <= np.finfo(self.dtype).eps * self.numerator


def identical(a: float | None, b: float | None) -> bool:
    """Return whether two numbers are the same bits: 0.0 is not -0.0, NaN is NaN."""
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("d", a) == struct.pack("d", b) or (a != a and b != b)
    return type(a) is type(b) and a == b


class Fit:
    """Symbols, and the values that they had in several recordings.

    Args:
        recordings: For each recording its integers, in one order.
        first: Positions of integers that are symbols whatever comes before them.
        tensors: Number of the integers, the first ones, that are of tensors: sizes, strides and
            offsets. Those may vary; any other must follow from them.

    Attributes:
        problem: Reason why the recordings are no program of several sizes, or None.
        symbols: For each symbol the position of the integer that defines it.
        values: For each recording the values of the symbols.
        sizes: For each position its `Size`.
    """

    def __init__(
        self,
        recordings: Sequence[Sequence[int]],
        first: Sequence[int] = (),
        tensors: int | None = None,
    ) -> None:
        self.problem: str | None = None
        self.symbols: list[int] = []
        self.values: list[list[int]] = [[] for _ in recordings]
        self._known: dict[tuple[int, ...], Size] = {}
        self._counts: dict[tuple[int, ...], tuple[tuple[Size, ...], int] | None] = {}
        columns = list(zip(*recordings, strict=True))
        for position in first:
            self._known[columns[position]] = self._define(position, columns[position])
        for position, seen in enumerate(columns):
            if seen in self._known:
                continue
            size = self.express(seen)
            if size is not None and tensors is not None and position < tensors:
                size = None if _may_be_chance(size, len(columns[0])) else size
            if size is None and tensors is not None and position >= tensors:
                size = self._rest(seen)
            if size is None and tensors is not None and position >= tensors:
                numbers = ", ".join(map(str, seen))
                self.problem = f"an argument that was {numbers} follows no size of a tensor"
                size = static(-1)
            self._known[seen] = size or self._define(position, seen)
        self.sizes = [self._known[seen] for seen in columns]

    def _define(self, position: int, seen: Sequence[int]) -> Size:
        """A new symbol."""
        self.symbols.append(position)
        for values, value in zip(self.values, seen):
            values.append(value)
        return Size(1, (len(self.symbols) - 1,), 0)

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
                if line and (degree == 1 or line[1] == 0 or line in _NEXT_TO_PRODUCTS):
                    found.append((_likelihood(degree, *line), Size(line[0], symbols, line[1])))
        return min(found, key=lambda x: x[0])[1] if found else None

    def _rest(self, seen: Sequence[int]) -> Size | None:
        """The rest that a symbol leaves of a static size; None where it is the rest of none."""
        for symbol in range(len(self.symbols)):
            totals = {values[symbol] + n for values, n in zip(self.values, seen)}
            if len(totals) == 1:
                return Size(-1, (symbol,), totals.pop())
        return None

    def derive(self, seen: Sequence[int]) -> Size | None:
        """As `express`, for integers that are not compared with those of later recordings.

        They must be among those that are, next to one of them, or of a form that is no coincidence.
        """
        seen = tuple(seen)
        if seen in self._known:
            return self._known[seen]
        size = self.express(seen)
        if (
            size is None
            or size.is_static
            or _likelihood(len(size.symbols), size.scale, size.offset)[0] < 4
            or any(_is_next(size, known) for known in self._known.values())
        ):
            return size
        return None

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
            if all(map(known.holds, seen, self.values)):
                return known
        return self._share(seen, rounded)

    def _share(self, seen: Sequence[float], dtype: str) -> Known | None:
        """A size, or the integer next to it, divided by one number: the step of a resize."""
        for column, size in self._known.items():
            if size.is_static:
                continue
            for offset in (0, -1):
                divisor = round((column[0] + offset) / seen[0])
                known = Known(None, (size,), offset, divisor, None, dtype)
                if divisor > 1 and all(map(known.holds, seen, self.values)):
                    return known
        return None

    def _count(self, seen: Sequence[int]) -> tuple[tuple[Size, ...], int] | None:
        """Sizes and the offset to their product that give these integers."""
        seen = tuple(seen)
        if seen not in self._counts:
            size = self.derive(seen)
            self._counts[seen] = self._product(seen) if size is None else ((size,), 0)
        return self._counts[seen]

    def _product(self, seen: tuple[int, ...]) -> tuple[tuple[Size, ...], int] | None:
        """The product of some varying sizes and a static one, or the integer next to it."""
        varying = [(size, column) for column, size in self._known.items() if not size.is_static]
        if len(varying) > _MOST_FACTORS:
            return None
        for degree in (2, 3):
            for chosen in itertools.combinations_with_replacement(varying, degree):
                products = [math.prod(row) for row in zip(*(column for _, column in chosen))]
                for offset in (0, -1, 1):
                    scale, rest = divmod(seen[0] - offset, products[0])
                    follows = all(n - offset == scale * p for n, p in zip(seen, products))
                    if scale > 0 and not rest and follows:
                        sizes = tuple(size for size, _ in chosen)
                        return (*sizes, static(scale))[: degree + (scale > 1)], offset
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
    return (degree if abs(offset) <= _SMALL * scale else 4), abs(offset)


def _is_next(size: Size, known: Size) -> bool:
    """Return whether sizes differ by a small number: the last of a window, and its length."""
    if (size.scale, size.symbols) != (known.scale, known.symbols):
        return False
    return abs(size.offset - known.offset) <= _SMALL * size.scale


def _may_be_chance(size: Size, recordings: int) -> bool:
    """Return whether sizes of tensors that lie on a line may be independent: any two values do."""
    if size.is_static or recordings > 2:
        return False
    if len(size.symbols) > 1 and size.offset:
        return True
    return _likelihood(len(size.symbols), size.scale, size.offset)[0] >= 4


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


def bucket(size: int, limit: int | None = None) -> int:
    """Bucket that serves ``size``: one of ``TPU_BUCKETS``, beyond them one of powers of two.

    Args:
        size: The size.
        limit: The largest size that there can be, where it is known.

    Example:
        >>> bucket(70), bucket(130), bucket(130, limit=160)
        (96, 192, 160)
    """
    chosen = next((b for b in config().buckets if b >= size), None) or _power(size)
    return chosen if limit is None or size > limit else min(chosen, limit)


def _power(size: int) -> int:
    """The next power of two, or three quarters of it from 96 on."""
    power = 1 << max(size - 1, 0).bit_length()
    return power * 3 // 4 if power >= 128 and size <= power * 3 // 4 else power
