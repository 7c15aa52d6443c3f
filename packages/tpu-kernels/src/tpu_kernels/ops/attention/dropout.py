"""Dropout of attention's probabilities: the random numbers of the plain path, drawn in kernels.

A number is a function of the key and of the place of the score, as `jax.random.bits` has it
(Threefry-2x32 of the index in row-major order, its halves xored), so that forward and backward, the
kernels and `tpu_core.lowering.attention` drop the same probabilities, in whatever blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpu_core.array_types import Bool, Float32, UInt32
from tpu_kernels.ops.attention.blocks import BlockGrid

# Of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", with 20 rounds.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_HALF = 16
_LOW = (1 << _HALF) - 1


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of the probabilities.

    Attributes:
        rate: The share.
        heads: Number of heads of the query.
    """

    rate: float
    heads: int

    def keep_mask(
        self,
        key_ref: Any,
        head: tuple[Any, Any],
        blocks: BlockGrid,
        i: Any,
        j: Any,
        row_axis: int = 0,
    ) -> Bool[Array, "_ _"]:
        """Mask of the probabilities of block ``(i, j)`` that are kept.

        Args:
            key_ref: Two scalars of 32 bits.
            head: Batch, and head of the query.
            blocks: Of the scores.
            i, j: Of queries and of keys.
            row_axis: 1 where each query has a column.
        """
        shape = [blocks.block_rows, blocks.block_columns]
        shape = shape[::-1] if row_axis else shape
        ones = [1, 1]
        ones[row_axis] = blocks.block_rows
        first = (head[0] * self.heads + head[1]) * blocks.rows + i * blocks.block_rows
        row = (first + lax.broadcasted_iota(np.int32, ones, row_axis)).astype(np.uint32)
        high, low = _wide_product(row, blocks.columns)
        place = lax.broadcasted_iota(np.int32, shape, 1 - row_axis)
        column = (j * blocks.block_columns + place).astype(np.uint32)
        low = low + column
        high = high + jnp.where(low < column, np.uint32(1), np.uint32(0))
        key = key_ref[0].astype(np.uint32), key_ref[1].astype(np.uint32)
        # As tpu_core.lowering.attention has it.
        threshold = np.uint32(min(int(self.rate * 2**32), 2**32 - 1))
        return _bits(key, high, low) >= threshold

    def applied(
        self, x: Float32[Array, "rows columns"], kept: Bool[Array, "rows columns"]
    ) -> Float32[Array, "rows columns"]:
        """``x`` with what is dropped 0 and the rest larger in turn."""
        factor = 0.0 if self.rate >= 1 else 1.0 / (1.0 - self.rate)
        return jnp.where(kept, x * factor, 0.0)


def _wide_product(
    a: UInt32[Array, "*shape"], b: int
) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
    """High and low words of the product of unsigned numbers of 32 bits."""
    low_a, high_a = a & _LOW, a >> _HALF
    low_b, high_b = np.uint32(b & _LOW), np.uint32(b >> _HALF)
    middle = low_a * high_b + (low_a * low_b >> _HALF)
    other = high_a * low_b + (middle & _LOW)
    return high_a * high_b + (middle >> _HALF) + (other >> _HALF), a * np.uint32(b)


def _bits(
    key: tuple[UInt32[Array, ""], UInt32[Array, ""]],
    high: UInt32[Array, "*shape"],
    low: UInt32[Array, "*shape"],
) -> UInt32[Array, "*shape"]:
    """32 random bits of a counter of 64."""
    keys = (*key, key[0] ^ key[1] ^ np.uint32(_PARITY))
    x, y = high + keys[0], low + keys[1]
    for n in range(5):
        for rotation in _ROTATIONS[n % 2]:
            x = x + y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x = x + keys[(n + 1) % 3]
        y = y + keys[(n + 2) % 3] + np.uint32(n + 1)
    return x ^ y
