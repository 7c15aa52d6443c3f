"""Masks and biases as the kernels read them: block by block, broadcast no further than needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl

from tpu_core.array_types import Float32, Num, Shaped
from tpu_kernels.ops.attention.blocks import BlockGrid


def prepared(
    bias: Shaped[Array, " ..."] | None, blocks: BlockGrid
) -> Num[Array, "batch heads rows columns"] | None:
    """A mask or bias of four dimensions, filled up to blocks; all but the last may be 1.

    Args:
        bias: Booleans, False where a score does not count, or numbers to add. Two to four
            dimensions that broadcast to those of the scores.
        blocks: Of the scores.

    Returns:
        Of dtype int8 for booleans with a row a query, or of a floating-point dtype.
    """
    if bias is None:
        return None
    bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    if bias.shape[3] != blocks.columns:
        bias = jnp.broadcast_to(bias, (*bias.shape[:3], blocks.columns))
    if bias.dtype == np.bool_:
        one_row = bias.shape[2] == 1
        bias = jnp.where(bias, 0.0, -jnp.inf) if one_row else bias.astype(np.int8)
    if bias.dtype != np.int8 and bias.dtype != jnp.bfloat16:
        bias = bias.astype(np.float32)
    rows = blocks.padded_rows - blocks.rows if bias.shape[2] > 1 else 0
    columns = blocks.padded_columns - blocks.columns
    return jnp.pad(bias, ((0, 0), (0, 0), (0, rows), (0, columns)))


def spec(
    bias: Num[Array, "batch heads rows columns"] | None,
    blocks: BlockGrid,
    index: Callable[..., tuple[Any, Any, Any, Any]],
) -> pl.BlockSpec | None:
    """The block of a prepared bias that goes with a block of scores.

    Args:
        bias: See `prepared`.
        blocks: Of the scores.
        index: Gives batch, head, and blocks of queries and keys for the grid's indices.
    """
    if bias is None:
        return None
    batch, heads, rows, _ = (n > 1 for n in bias.shape)

    def place(*ids: Any) -> tuple[Any, ...]:
        b, h, i, j = index(*ids)
        return b if batch else 0, h if heads else 0, i if rows else 0, j

    block_rows = blocks.block_rows if rows else 1
    return pl.BlockSpec((None, None, block_rows, blocks.block_columns), place)


def applied(
    scores: Float32[Array, "rows columns"], bias: Num[Array, "_ _"], *, row_axis: int = 0
) -> Float32[Array, "rows columns"]:
    """Scores with a block of a prepared bias; `row_axis` 1 where each query has a column."""
    if bias.dtype == np.int8:
        bias = bias.astype(np.int32)
        bias = bias.astype(np.float32).T if row_axis else bias
        return jnp.where(bias != 0, scores, -jnp.inf)
    bias = bias.astype(np.float32)
    if row_axis:
        bias = jnp.expand_dims(bias[0], -1) if bias.shape[0] == 1 else bias.T
    return scores + bias
