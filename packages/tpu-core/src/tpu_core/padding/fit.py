"""Relations between sizes: those that change between recordings of a segment, and those derived.

Two recordings of one program differ in some integers. Sizes of tensors come first, then their
strides and offsets, then arguments that are declared sizes. The first that differ become symbols;
each other one is a `Size` of them, ``scale * product(symbols) + offset``, if there is one, and a
symbol too if not. An argument may be the rest that a size leaves of another as well.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tpu_core.padding.numbers import MOST_FACTORS, Numbers
from tpu_core.padding.sizes import LEAST, Known, Size, static

# Most that an offset is for a scale of 1, where a size is likely to be another with an offset.
_SMALL = 4
# Symbols beyond which those of inputs are likely to lie on a line by chance.
_MANY = 4
# Rank of a form that may well be chance.
_UNLIKELY = 8
# Between the least and the most of values that differ from a size by one offset, and not by chance.
_FAR = 8
# Scale and offset of a bound that lies next to a number of elements, as a limit of indices does.
_NEXT_TO_PRODUCTS = ((1, 1), (1, -1))


class Fit:
    """Symbols, and the values that they had in several recordings.

    Args:
        recordings: For each recording its integers, in one order.
        first: Positions of integers that are symbols whatever comes before them.
        tensors: Number of the integers, the first ones, that are of tensors: sizes, strides and
            offsets.
        inputs: Positions of those that no op computed.
        origins: For positions of those that an op computed the positions that they may follow from
            with an offset: any, if there are none.
        stepped: Pairs of positions of which one is the other divided and rounded.

    Attributes:
        symbols: For each symbol the position of the integer that defines it. That is the symbol
            itself, or for an argument, or a place below `LEAST`, a `Size` of it.
        values: For each recording the values of the symbols.
        sizes: For each position its `Size`.
    """

    def __init__(
        self,
        recordings: Sequence[Sequence[int]],
        first: Sequence[int] = (),
        tensors: int | None = None,
        inputs: Collection[int] = (),
        origins: Mapping[int, Collection[int]] = MappingProxyType({}),
        stepped: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._columns = list(zip(*recordings, strict=True))
        self._stepped = _groups([(self._columns[a], self._columns[b]) for a, b in stepped])
        self._inputs, self._origins = inputs, origins
        first = list(first)
        self._recordings, self._tensors = len(recordings), tensors
        while (factor := self._assign(first)) is not None:
            first.append(factor)
        self.sizes = [self._known[seen] for seen in self._columns]
        self._numbers = Numbers(self._known, self.values, self.derive)

    def _assign(self, first: Sequence[int]) -> int | None:
        """Find the size of each integer.

        Returns:
            None, or the position of one that is to be a symbol before those that come first.
        """
        self.symbols: list[int] = []
        self.values: list[list[int]] = [[] for _ in range(self._recordings)]
        self._known: dict[tuple[int, ...], Size] = {}
        columns, tensors = self._columns, self._tensors
        for position in first:
            self._known[columns[position]] = self._define(position, columns[position])
        for position, seen in enumerate(columns):
            if seen in self._known:
                continue
            size = self.express(seen)
            if tensors is not None and position < tensors:
                if size is not None and self._may_be_chance(size, seen, position):
                    size = None
                if (half := self._half(size, seen)) is not None:
                    return half
                if size is None or size.offset and not size.is_static:
                    factor = self._shifted_factor(seen)
                    if factor is not None:
                        symbol = self._known[factor].symbols[0]
                        if symbol >= len(first) and not self._is_in_product(symbol):
                            return columns.index(factor)
                        size = None
                if size is None and self._divides_symbol(seen, len(first)):
                    return position
            elif tensors is not None and size is None:
                size = self._rest(seen)
            self._known[seen] = size or self._define(position, seen)
        return self._more_frequent(len(first))

    def _more_frequent(self, first: int) -> int | None:
        """Position of a size that is next to a symbol and is there more often: what an op makes of
        it, as the rows of an image, is a product of it and not of the size with its border.

        Args:
            first: Number of the symbols that stay.
        """
        counts = Counter(self._columns[: self._tensors])
        for column, size in self._known.items():
            if size.scale != 1 or len(size.symbols) != 1 or not size.offset:
                continue
            (symbol,) = size.symbols
            own = self._columns[self.symbols[symbol]]
            if symbol >= first and counts[column] > counts[own] and not self._is_in_product(symbol):
                return self._columns.index(column)
        return None

    def _shifted_factor(self, seen: Sequence[int]) -> tuple[int, ...] | None:
        """A size next to a symbol whose multiple by other sizes these values are, as the elements
        of sequences without their last ones: as a symbol itself it has products.
        """
        varying = [(size, column) for column, size in self._known.items() if not size.is_static]
        shifted = [
            column
            for size, column in varying
            if size.scale == 1 and len(size.symbols) == 1 and size.offset
        ]
        if not shifted or len(varying) > MOST_FACTORS:
            return None
        for degree in (1, 2):
            for others in itertools.combinations_with_replacement(varying, degree):
                for column in shifted:
                    rows = zip(column, *(other for _, other in others))
                    products = [math.prod(row) for row in rows]
                    scale = seen[0] // products[0] if products[0] else 0
                    if scale > 0 and all(n == scale * p for n, p in zip(seen, products)):
                        return column
        return None

    def _divides_symbol(self, seen: Sequence[int], first: int) -> bool:
        """Return whether a symbol is a multiple of these values, or the product of them and another
        symbol, as the rows that a view makes a batch of sequences, or the columns that it makes
        heads: it follows from them then, and they not from it.

        Args:
            seen: Values that are no `Size` of the symbols.
            first: Number of the symbols that stay.
        """
        columns = list(zip(*self.values))
        for i, whole in enumerate(columns[first:], first):
            for other in ((1,) * len(seen), *columns[:i], *columns[i + 1 :]):
                products = [n * k for n, k in zip(seen, other)]
                if self._is_stepped(whole, products):
                    continue
                scale = whole[0] // products[0] if products[0] else 0
                # Two values are those of a multiple of a product by chance now and then.
                if scale < 1 or scale > 1 and max(other) > 1 and self._recordings < 3:
                    continue
                if all(n == scale * product for n, product in zip(whole, products)):
                    return True
        return False

    def _is_in_product(self, symbol: int) -> bool:
        return any(len(s.symbols) > 1 and symbol in s.symbols for s in self._known.values())

    def _define(self, position: int, seen: Sequence[int]) -> Size:
        """A new symbol, or what an argument or a place is made of: it may be below `LEAST`."""
        scale, offset = 1, 0
        if seen[0] < 0:
            scale, offset = -1, LEAST - 1
        elif self._is_argument(position) or min(seen) < LEAST:
            offset = -LEAST
        self.symbols.append(position)
        for values, value in zip(self.values, seen):
            values.append(scale * (value - offset))
        return Size(scale, (len(self.symbols) - 1,), offset)

    def _is_argument(self, position: int) -> bool:
        return self._tensors is not None and position >= self._tensors

    def express(self, seen: Sequence[int]) -> Size | None:
        """The simplest `Size` that has these values, one a recording; None where there is none."""
        if all(v == seen[0] for v in seen):
            return static(seen[0])
        found: list[tuple[tuple[float, int], Size]] = []
        for degree in (1, 2, 3):
            for symbols in itertools.combinations_with_replacement(
                range(len(self.symbols)), degree
            ):
                products = [math.prod(values[s] for s in symbols) for values in self.values]
                line = _line(products, seen)
                if line and line[0] > 1 and self._is_stepped(products, seen):
                    continue
                if line and (degree == 1 or line[1] == 0 or line in _NEXT_TO_PRODUCTS):
                    found.append((_likelihood(degree, *line), Size(line[0], symbols, line[1])))
        return min(found, key=lambda x: x[0])[1] if found else None

    def _is_stepped(self, a: Sequence[int], b: Sequence[int]) -> bool:
        """Return whether one of two sizes may be the other divided and rounded, if in steps."""
        group = self._stepped.get(tuple(a))
        return group is not None and group == self._stepped.get(tuple(b))

    def _may_be_chance(self, size: Size, seen: Sequence[int], position: int) -> bool:
        """Return whether sizes of tensors that lie on a line may be independent: any two values do.

        Those of inputs are independent more often, and among many some lie on a line.
        """
        if size.is_static or not size.offset:
            return False
        is_input = position in self._inputs
        points = self._points(size, seen)
        if is_input and len(self.symbols) > _MANY:
            return size.scale > 1 or abs(size.offset) > 1 or len(points) == 2
        if len(points) > 2:
            return False
        if len(size.symbols) > 1 or is_input and size.scale > 1:
            return True
        if position in self._origins:
            near = [self._known.get(self._columns[p]) for p in self._origins[position]]
            if not any(known and set(size.symbols) <= set(known.symbols) for known in near):
                return True
        return _likelihood(1, size.scale, size.offset)[0] >= _UNLIKELY

    def _points(self, size: Size, seen: Sequence[int]) -> set[tuple[int, ...]]:
        return {(*(row[s] for s in size.symbols), n) for row, n in zip(self.values, seen)}

    def _half(self, size: Size | None, seen: Sequence[int]) -> int | None:
        """Position of an input's size that these are a multiple of, where they lie on a line, too.

        An image that was halved and is doubled again has lost one of each odd size; if the
        recordings have no even one, it is taken for one position less.
        """
        if size is None or size.is_static or not size.offset or len(self._points(size, seen)) > 2:
            return None
        for position in sorted(self._inputs):
            column = self._columns[position]
            if column in self._known or not column[0] or len(set(column)) < 2:
                continue
            scale = seen[0] // column[0]
            if self._is_stepped(column, seen):
                continue
            if scale > 1 and all(n == scale * c for n, c in zip(seen, column)):
                return position
        return None

    def _rest(self, seen: Sequence[int]) -> Size | None:
        """The rest that a symbol leaves of a static size, or a size of another, if it is one."""
        for symbol in range(len(self.symbols)):
            totals = {values[symbol] + n for values, n in zip(self.values, seen)}
            if len(totals) == 1:
                return Size(1, (symbol,), 0).rest_of(static(totals.pop()))
        for column, size in self._known.items():
            if size.is_static or size.total is not None:
                continue
            total = self._known.get(tuple(n + m for n, m in zip(column, seen)))
            if total is not None and not total.is_static and total.total is None:
                return size.rest_of(total)
        return None

    def _next_to_rest(self, seen: Sequence[int]) -> Size | None:
        """A size next to the rest that one leaves of another, or that an argument leaves of one."""
        for column, size in self._known.items():
            if size.total is not None:
                distances = {n - m for n, m in zip(seen, column)}
                if len(distances) == 1 and abs(distance := distances.pop()) <= _SMALL:
                    return replace(size, offset=size.offset + distance)
            elif any(self._is_argument(self.symbols[s]) for s in size.symbols):
                whole = [n + m for n, m in zip(seen, column)]
                for distance in (0, -1, 1):
                    total = self._known.get(tuple(n - distance for n in whole))
                    if total is not None and total.total is None:
                        rest = size.rest_of(total)
                        return replace(rest, offset=rest.offset + distance)
        return None

    def derive(self, seen: Sequence[int]) -> Size | None:
        """As `express`, for integers that are not compared with those of later recordings.

        They must be among those that are, next to one of them, or of a form that is no coincidence.
        """
        seen = tuple(seen)
        if seen in self._known:
            return self._known[seen]
        size = self.express(seen)
        if size is not None and (
            size.is_static
            or size.scale == 1
            and max(seen) - min(seen) >= _FAR
            or _likelihood(len(size.symbols), size.scale, size.offset)[0] < _UNLIKELY
            or any(_is_next(size, known) for known in self._known.values())
        ):
            return size
        return self._next_to_rest(seen)

    def follow(self, seen: Sequence[float], dtype: Any) -> Known | None:
        """Expression of a number that was ``seen`` in the recordings: see `Numbers.follow`."""
        return self._numbers.follow(seen, dtype)

    def solve(self, integers: Sequence[int]) -> list[int] | None:
        """The symbols' values in another recording; None where it does not follow the sizes."""
        if len(integers) != len(self.sizes):
            return None
        own = ((integers[position], self.sizes[position]) for position in self.symbols)
        values = [size.scale * (n - size.offset) for n, size in own]
        for size, integer in zip(self.sizes, integers):
            if size.value(values) != integer:
                return None
        return values


def _groups(pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[Any, int]:
    """A number for each group of what is connected by pairs."""
    found: dict[Any, int] = {}
    for a, b in pairs:
        new, old = found.setdefault(a, len(found)), found.setdefault(b, len(found))
        if new != old:
            found = {column: new if n == old else n for column, n in found.items()}
    return found


def _likelihood(degree: int, scale: int, offset: int) -> tuple[float, int]:
    """Rank of a form; any two values lie on a line, so a multiple or a small offset is likelier."""
    if offset == 0:
        return degree, 0
    if abs(offset) > max(scale, _SMALL * min(scale, _SMALL)):
        return _UNLIKELY, abs(offset)
    # A product is no chance, as a line through two values may be.
    return (degree if scale == 1 else degree + 1.5), abs(offset)


def _is_next(size: Size, known: Size) -> bool:
    """Return whether sizes differ by a small number: the last of a window, and its length."""
    if (size.scale, size.symbols) != (known.scale, known.symbols):
        return False
    return abs(size.offset - known.offset) <= _SMALL * size.scale


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
