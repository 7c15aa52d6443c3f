"""Products with weights of 4 bits, packed as PyTorch packs them for CUDA.

The layout is that of checkpoints, and of models that were packed on another device. It is what
tensor cores load: an int32 holds 8 numbers of a row, of which the first 4 are those of even columns
8 apart. Numbers are 0 to 15 and stand for ``(number - 8) * scale + zero``, with a scale and a zero
for each group of columns of a row.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpu_core.array_types import Float, Int32, UInt8
from tpu_core.dtypes import cast
from tpu_core.lowering.int4_layout import K_TILE, LANES, TILE
from tpu_core.lowering.matmul import contract
from tpu_core.lowering.registry import lowering

_ROW_COLUMN = (((1,), (1,)), ((), ()))
# A lane has 4 bytes of a row, 4 apart, with 2 columns each.
_BYTES = 4
_STEP = LANES // TILE
# Where the 4 bits of a byte's first column are in an int32, then those of its second.
_SHIFTS = np.arange(2)[:, None] * 16 + np.arange(_BYTES) * 4
_MIDDLE = 8


@lowering("aten._convert_weight_to_int4pack.default")
def convert_weight(
    weight: UInt8[Array, "rows pairs"], inner_k_tiles: int
) -> Int32[Array, "tiles outer 32 inner"]:
    """Pack bytes that have an even column in the high bits, the next in the low."""
    rows = weight.shape[0] // TILE
    halves = jnp.stack([weight >> 4, weight & 15]).astype(np.int32)
    # (half, tile, row, tile of columns, int32, byte of a lane, lane of a row)
    halves = halves.reshape(2, rows, TILE, -1, inner_k_tiles // 2, _BYTES, _STEP)
    halves = halves.transpose(1, 3, 2, 6, 4, 0, 5)
    packed = jnp.sum(halves << _SHIFTS.astype(np.int32), axis=(5, 6), dtype=np.int32)
    return packed.reshape(rows, -1, LANES, inner_k_tiles // 2)


def _rows(weight: Int32[Array, "tiles outer 32 inner"]) -> Int32[Array, "8*tiles 4*outer*inner"]:
    """The int32 of a packed weight by rows; see `_columns` for their order."""
    tiles, outer, _, inner = weight.shape
    by_row = weight.reshape(tiles, outer, TILE, _STEP * inner).transpose(0, 2, 1, 3)
    return by_row.reshape(tiles * TILE, outer * _STEP * inner)


def _columns(x: Float[Array, "rows columns"], inner: int) -> Float[Array, "8 rows columns//8"]:
    """For each place in an int32 what meets `_rows`."""
    parts = x.reshape(x.shape[0], -1, inner, _BYTES, _STEP, 2)
    return parts.transpose(5, 3, 0, 1, 4, 2).reshape(_SHIFTS.size, x.shape[0], -1)


@lowering("aten._weight_int4pack_mm.default")
def weight_mm(
    x: Float[Array, "rows columns"],
    weight: Int32[Array, "tiles outer 32 inner"],
    group: int,
    scales_and_zeros: Float[Array, "columns//{group} 8*tiles 2"],
) -> Float[Array, "rows 8*tiles"]:
    """``x @ w.T``; as on CUDA, ``w`` is rounded to the dtype of ``x``.

    The columns of ``x`` are put into the order of the packed ones, not the other way round: there
    are fewer of them, and an array whose last dimension is small takes up many times its size.
    """
    inner = weight.shape[3]
    packed = _rows(weight)
    # The columns of an int32 are in one group, and so are those of `_STEP` lanes.
    chunks = packed.shape[1] // (_STEP * inner), _STEP, inner
    of_chunk = np.arange(chunks[0])[:, None] * inner + np.arange(inner)
    place = np.broadcast_to((of_chunk * 2 * K_TILE // group)[:, None], chunks).reshape(-1)
    # Spread by a product with ones and zeros, which is exact: a gather along lanes is slow.
    spread = (place == np.arange(scales_and_zeros.shape[0])[:, None]).astype(scales_and_zeros.dtype)
    exact = lax.Precision.HIGHEST
    scales, zeros = (
        lax.dot_general(
            scales_and_zeros[..., i],
            spread,
            (((0,), (0,)), ((), ())),
            precision=exact,
            preferred_element_type=np.float32,
        )
        for i in range(2)
    )
    parts = []
    for part, shift in zip(_columns(x, inner), _SHIFTS.reshape(-1)):
        numbers = ((packed >> int(shift)) & 15) - _MIDDLE
        w = cast(numbers.astype(np.float32) * scales + zeros, x.dtype)
        parts.append(contract(part, w, _ROW_COLUMN, np.float32))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
