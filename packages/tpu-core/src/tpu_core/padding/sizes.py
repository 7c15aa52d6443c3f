"""Sizes that vary, numbers that follow from them, and the buckets that serve them."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_core.config import config
from tpu_core.errors import NotPaddableError as NotPaddableError

# The least value of a symbol: what varies has several elements, as one is broadcast.
LEAST = 2


@dataclass(frozen=True, slots=True)
class Size:
    """``scale * product(symbols) + offset``; without symbols, the static size ``offset``.

    With a total, and a scale below zero, it is what that leaves of the total, as the padding up to
    it.

    Example:
        >>> Size(2, (0,), 1).value([10])
        21
        >>> Size(-1, (0,), 0, static(64)).value([10])
        54
    """

    scale: int
    symbols: tuple[int, ...]
    offset: int
    total: Size | None = None

    @property
    def is_static(self) -> bool:
        return not self.symbols

    def value(self, values: Sequence[Any]) -> Any:
        """The size where the symbols have these values: integers or symbolic dims."""
        if not self.symbols:
            return self.offset
        total = 0 if self.total is None else self.total.value(values)
        return self.scale * math.prod(values[s] for s in self.symbols) + self.offset + total

    def bound(self, buckets: Sequence[int]) -> int:
        """Its size in arrays between programs, whose symbols are padded to ``buckets``."""
        if self.total is not None:
            return self.total.bound(buckets) + max(self.offset, 0)
        if not self.symbols:
            return self.offset
        return self.scale * math.prod(buckets[s] for s in self.symbols)

    def times(self, n: int) -> Size:
        """Its multiple."""
        total = None if self.total is None else self.total.times(n)
        return Size(self.scale * n, self.symbols, self.offset * n, total)

    def rest_of(self, total: Size) -> Size:
        """The rest that it leaves of a larger size."""
        return Size(-self.scale, self.symbols, -self.offset, total)


def static(size: int) -> Size:
    """A size that does not vary."""
    return Size(0, (), size)


# What a size may divide to give a number: one (a mean), or two (the gradient of a variance).
NUMERATORS = (1, 2)


@dataclass(frozen=True, slots=True)
class Known:
    """A number inside an op: always the same, a count, a count divided by a number that is always
    the same, one or two divided by a count, or one divided by its square root.

    A count is a size, or the product of several with a small offset: of the elements of an image
    whose height is a size less 2.

    Attributes:
        constant: The number, where it is always the same.
        factors: The sizes whose product is the count, less its offset.
        offset: Summand beside the product.
        divisor: The number that divides the count.
        numerator: The number that the count divides; None where the count is not the divisor.
        dtype: The quotient's, to which it is rounded.
        root: Whether the square root of the count is the divisor, as in attention.
    """

    constant: float | None = None
    factors: tuple[Size, ...] = ()
    offset: int = 0
    divisor: int = 1
    numerator: int | None = None
    dtype: str = ""
    root: bool = False

    def holds(self, number: float, values: Sequence[int]) -> bool:
        """Return whether it is this number where the symbols have these values."""
        if not self.factors:
            return identical(number, self.constant)
        n = math.prod(size.value(values) for size in self.factors) + self.offset
        if self.numerator is None and self.divisor == 1:
            return number == n
        if self.numerator is None:  # exactly: a place that is read may follow from it
            return bool(np.dtype(self.dtype).type(n / self.divisor) == number)
        if self.root:
            return n > 0 and bool(abs(number * math.sqrt(n) - 1) <= np.finfo(self.dtype).eps)
        return abs(number * n - self.numerator) <= np.finfo(self.dtype).eps * self.numerator


def identical(a: float | None, b: float | None) -> bool:
    """Return whether two numbers are the same bits: 0.0 is not -0.0, NaN is NaN."""
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("d", a) == struct.pack("d", b) or (a != a and b != b)
    return type(a) is type(b) and a == b


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
