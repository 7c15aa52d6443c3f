"""Arrays whose dims are longer than what they mean: which elements count, and moving them about.

A dim of size ``B * T``, made by merging a static ``B`` with a ``T`` padded to ``P``, has its
padding in between: it is kept as the factors (B, T), whose product ``B * P`` it is in memory. Most
dims have one factor, with the padding at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.padding.sizes import NotPaddableError, Size, static

Dim = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class Padded:
    """An array and the meaning of its dims."""

    array: jax.Array
    dims: tuple[Dim, ...]

    @property
    def is_static(self) -> bool:
        return all(is_static(d) for d in self.dims)


def replaced(dims: tuple[Dim, ...], axis: int, dim: Dim) -> tuple[Dim, ...]:
    """The dims with another one at an axis."""
    return (*dims[:axis], dim, *dims[axis + 1 :])


def is_static(dim: Dim) -> bool:
    """Return whether a dim has no padding."""
    return all(s.is_static for s in dim)


def folded(dim: Dim) -> Dim:
    """The dim as fewest factors: what differs in no more than this is the same in memory.

    A static factor is part of the one before it, whose padding it keeps at the end.

    Example:
        >>> t = Size(1, (0,), 0)
        >>> folded((static(2), t, static(3), static(4))) == (static(2), Size(12, (0,), 0))
        True
    """
    factors: list[Size] = []
    for size in dim:
        if size.is_static and factors:
            factors[-1] = factors[-1].times(size.offset)
        else:
            factors.append(size)
    return tuple(factors[1:] if len(factors) > 1 and factors[0] == static(1) else factors)


def whole(array: jax.Array) -> Padded:
    """An array without padding."""
    return Padded(array, tuple((static(n),) for n in array.shape))


class Space:
    """Actual and padded sizes of one program.

    Args:
        actual: The symbols' values, run-time scalars.
        buckets: Padded size of each.
    """

    def __init__(self, actual: Sequence[jax.Array], buckets: Sequence[int]) -> None:
        self._actual = actual
        self.buckets = buckets

    def actual(self, size: Size) -> jax.Array | int:
        """The size at run time, ``int32``."""
        if size.is_static:
            return size.offset
        product = self._actual[size.symbols[0]]
        for s in size.symbols[1:]:
            product = product * self._actual[s]
        total = 0 if size.total is None else self.actual(size.total)
        return product * size.scale + size.offset + total

    def padded(self, size: Size) -> int:
        """The size in memory inside the program."""
        if size.total is None:
            return size.value(self.buckets)
        return self.padded(size.total) + max(size.offset, 0)

    def length(self, dim: Dim) -> int:
        """Size of a dim in memory."""
        return math.prod(self.padded(s) for s in dim)

    def count(self, dim: Dim) -> jax.Array | int:
        """Run-time size of a dim."""
        product: jax.Array | int = 1
        for size in dim:
            product = product * self.actual(size)
        return product

    def valid(self, dim: Dim) -> jax.Array:
        """Mask of the valid indices along a dim."""
        dim = folded(dim)
        index = jnp.arange(self.length(dim), dtype=np.int32)
        counts = [
            lax.lt(digit, lax.broadcast(self.actual(size), digit.shape))
            for size, digit in self._digits(dim, index)
            if not size.is_static
        ]
        return functools.reduce(lax.bitwise_and, counts, jnp.ones(index.shape, bool))

    def _digits(self, dim: Dim, index: jax.Array) -> list[tuple[Size, jax.Array]]:
        digits = []
        # Indices are not negative, so that nothing need be made of signs.
        for size in reversed(dim[1:]):
            n = lax.full_like(index, max(self.padded(size), 1))
            digits.append((size, lax.rem(index, n)))
            index = lax.div(index, n)
        return [(dim[0], index), *digits[::-1]]

    def mask(self, x: Padded, axes: Sequence[int], value: Any) -> jax.Array:
        """The array with ``value`` wherever an index along one of the axes is padding."""
        shape = x.array.shape
        counts = [
            lax.broadcast_in_dim(self.valid(x.dims[axis]), shape, (axis,))
            for axis in axes
            if not is_static(x.dims[axis])
        ]
        if not counts:
            return x.array
        valid = functools.reduce(lax.bitwise_and, counts)
        return lax.select(valid, x.array, jnp.full(shape, value, x.array.dtype))

    def logical_index(self, dim: Dim, index: jax.Array) -> jax.Array:
        """Logical index of an index in memory along a dim."""
        dim = folded(dim)
        if len(dim) == 1:
            return index
        found = jnp.zeros_like(index)
        for size, digit in self._digits(dim, index):
            found = found * jnp.asarray(self.actual(size), index.dtype) + digit
        return found

    def memory_index(self, dim: Dim, index: jax.Array) -> jax.Array:
        """Index in memory of a logical index along a dim; the inverse of `logical_index`."""
        dim = folded(dim)
        if len(dim) == 1:
            return index
        found, stride = jnp.zeros_like(index), 1
        for size in reversed(dim):
            actual = jnp.maximum(jnp.asarray(self.actual(size), index.dtype), 1)
            found = found + (index % actual) * stride
            index = index // actual
            stride *= self.padded(size)
        return found

    def as_prefix(self, x: Padded, axis: int, size: Size | None = None) -> Padded:
        """The same with all padding of one dim at its end."""
        dim = x.dims[axis]
        if len(dim) == 1:
            return x
        simple = folded(dim)
        if len(simple) == 1 and size in (None, simple[0]):
            return Padded(x.array, replaced(x.dims, axis, simple))
        merged = size or merge(dim)
        if merged is None:
            raise NotPaddableError("a dim merged from several that vary")
        index = jnp.arange(self.padded(merged), dtype=np.int32)
        array = jnp.take(x.array, self.memory_index(dim, index), axis=axis, mode="clip")
        return Padded(array, replaced(x.dims, axis, (merged,)))

    def relayout(self, x: Padded, dims: tuple[Dim, ...]) -> Padded:
        """The same values with other factors: both describe the same logical sizes, dim by dim."""
        array = x.array
        for axis, (have, want) in enumerate(zip(x.dims, dims)):
            if folded(have) == folded(want):
                continue
            index = self.logical_index(want, jnp.arange(self.length(want), dtype=np.int32))
            array = jnp.take(array, self.memory_index(have, index), axis=axis, mode="clip")
        return Padded(array, dims)

    def resized(self, array: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The array cut off or filled up at the end of each dim."""
        if array.shape == tuple(shape):
            return array
        ends = [(0, n - m, 0) for m, n in zip(array.shape, shape)]
        return lax.pad(array, jnp.zeros((), array.dtype), ends)


def merge(dim: Dim) -> Size | None:
    """One size for the product of factors, where there is one."""
    scale = 1
    symbols: tuple[int, ...] = ()
    varying = [s for s in dim if not s.is_static]
    for s in dim:
        if s.is_static:
            scale *= s.offset
    if not varying:
        return static(scale)
    if len(varying) == 1:
        (size,) = varying
        return size.times(scale)
    for size in varying:
        if size.offset or size.total is not None:
            return None
        scale *= size.scale
        symbols += size.symbols
    return Size(scale, tuple(sorted(symbols)), 0)
