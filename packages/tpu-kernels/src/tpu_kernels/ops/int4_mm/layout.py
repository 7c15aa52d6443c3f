"""Weights of 4 bits as a TPU reads them: ``int32[columns / 8, rows]``.

Rows of the weight, the columns of the product, are along the lanes. Of 128 columns of the weight,
int32 ``w`` of 16 holds, in the bits from ``16 * half + 4 * i``, column ``32 * i + 2 * w + half``.
So four shifts and masks by ``0x000F000F`` give numbers of 16 bits, two in each int32, as a vector
register holds two rows of bfloat16: as many bits of the exponent as `BIAS` has, set in place,
make them ``128 + number`` in bfloat16. They stand in the order of the columns.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpu_core.array_types import Int32, UInt8

CHUNK = 128  # columns whose order the layout changes
WORDS = CHUNK // 8
PLACES = 4  # in each half of an int32
MASK = 0x000F000F
MIDDLE = 8
# 128 in bfloat16, twice: its last four bits count in ones.
EXPONENTS = 0x43004300
BIAS = 128

# Of the layout for CUDA, whose words have 4 places as well; see `tpu_core.lowering.int4`.
_CUDA_ROWS, _CUDA_QUADS = 8, 4


def pack(weight: UInt8[Array, "rows pairs"]) -> Int32[Array, "pairs//4 rows"]:
    """From pairs of columns: an even one in the high bits, the next in the low.

    The columns are a multiple of `CHUNK`.
    """
    rows = weight.shape[0]
    halves = jnp.stack([weight >> 4, weight & 15]).astype(np.int32)
    # (half, row, chunk, place, word)
    halves = halves.reshape(2, rows, -1, PLACES, WORDS)
    shifts = 16 * np.arange(2)[:, None, None, None, None] + 4 * np.arange(PLACES)[:, None]
    words = jnp.sum(halves << shifts.astype(np.int32), axis=(0, 3), dtype=np.int32)
    return words.transpose(1, 2, 0).reshape(-1, rows)


def repack(packed: Int32[Array, "tiles chunks 32 4"]) -> Int32[Array, "16*chunks 8*tiles"]:
    """From what ``_convert_weight_to_int4pack`` makes for 8 inner tiles of columns."""
    tiles, chunks, _, _ = packed.shape
    words = packed.reshape(tiles, chunks, _CUDA_ROWS, _CUDA_QUADS, PLACES)
    words = words.transpose(1, 3, 4, 0, 2).reshape(chunks, _CUDA_QUADS, PLACES, -1)
    # What is the word there is the place here, and the other way round.
    turned = [
        sum(
            (((words[:, :, place] >> (4 * i)) & MASK) << (4 * place) for place in range(PLACES)),
            start=jnp.zeros((), np.int32),
        )
        for i in range(PLACES)
    ]
    return jnp.stack(turned, 1).reshape(chunks * WORDS, -1)


def numbers(packed: Int32[Array, "words rows"]) -> Int32[Array, "8*words rows"]:
    """The numbers, 0 to 15; a row for each column of the weight."""
    words = packed.reshape(-1, 1, WORDS, 1, packed.shape[1])
    shifts = 4 * np.arange(PLACES)[:, None, None, None] + 16 * np.arange(2)[:, None]
    found = lax.shift_right_logical(
        jnp.broadcast_to(words, (len(words), PLACES, WORDS, 2, packed.shape[1])),
        jnp.broadcast_to(shifts.astype(np.int32), (len(words), PLACES, WORDS, 2, packed.shape[1])),
    )
    return (found & 15).reshape(-1, packed.shape[1])
