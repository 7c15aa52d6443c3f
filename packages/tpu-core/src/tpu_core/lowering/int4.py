"""Products with weights of 4 bits, packed as PyTorch packs them for CUDA.

The layout is that of checkpoints, and of models that were packed on another device. It is what
tensor cores load: an int32 holds 8 numbers of a row, of which the first 4 are those of even columns
8 apart. Numbers are 0 to 15 and stand for ``(number - 8) * scale + zero``, with a scale and a zero
for each group of columns of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tpu_core.lowering.dtypes import cast
from tpu_core.lowering.matmul import contract
from tpu_core.lowering.registry import lowering
from tpu_core.recorder.int4 import K_TILE, LANES, TILE

_ROW_COLUMN = (((1,), (1,)), ((), ()))
# A lane has 4 bytes of a row, 4 apart, with 2 columns each.
_BYTES = 4
_STEP = LANES // TILE
# Where the 4 bits of a byte's first column are in an int32, then those of its second.
_SHIFTS = np.arange(2)[:, None] * 16 + np.arange(_BYTES) * 4
_MIDDLE = 8


@lowering("aten._convert_weight_to_int4pack.default")
def convert_weight(weight: jax.Array, inner_k_tiles: int) -> jax.Array:
    """Packs ``uint8[N, K/2]``; a byte has an even column in its high bits, the next in the low."""
    rows = weight.shape[0] // TILE
    halves = jnp.stack([weight >> 4, weight & 15]).astype(np.int32)
    # (half, tile, row, tile of columns, int32, byte of a lane, lane of a row)
    halves = halves.reshape(2, rows, TILE, -1, inner_k_tiles // 2, _BYTES, _STEP)
    halves = halves.transpose(1, 3, 2, 6, 4, 0, 5)
    packed = jnp.sum(halves << _SHIFTS.astype(np.int32), axis=(5, 6), dtype=np.int32)
    return packed.reshape(rows, -1, LANES, inner_k_tiles // 2)


def unpacked(weight: jax.Array) -> jax.Array:
    """Numbers from -8 to 7, ``int32[N, K]``, of a packed weight."""
    rows, columns, _, inner = weight.shape
    bits = (weight[..., None, None] >> _SHIFTS.astype(np.int32)) & 15
    bits = bits.reshape(rows, columns, TILE, _STEP, inner, 2, _BYTES)
    bits = bits.transpose(0, 2, 1, 4, 6, 3, 5)
    return bits.reshape(rows * TILE, columns * inner * 2 * K_TILE) - _MIDDLE


@lowering("aten._weight_int4pack_mm.default")
def weight_mm(
    x: jax.Array, weight: jax.Array, group: int, scales_and_zeros: jax.Array
) -> jax.Array:
    """``x @ w.T``; as on CUDA, ``w`` is rounded to the dtype of ``x``."""
    numbers = unpacked(weight)
    wide = scales_and_zeros.astype(np.float32)
    scales, zeros = (wide[..., i].T[:, :, None] for i in range(2))
    groups = numbers.reshape(numbers.shape[0], -1, group).astype(np.float32)
    w = (groups * scales + zeros).reshape(numbers.shape)
    return contract(x, cast(w, x.dtype), _ROW_COLUMN)
