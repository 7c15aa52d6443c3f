"""The kernel of attention's forward pass (FlashAttention-2, algorithm 1).

A program of the grid has a block of queries and meets one block of keys after the other. Maxima and
sums of its rows stand in all lanes of their scratch memory, so that they meet a block of scores
without a broadcast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_core.array_types import Float, Float32, Num, UInt32
from tpu_kernels.ops.attention import masks
from tpu_kernels.ops.attention.blocks import LANES, BlockGrid
from tpu_kernels.ops.attention.dropout import Dropout
from tpu_kernels.ops.attention.overloads import KERNEL_FORWARD

FLOAT32 = np.dtype(np.float32)
QUERY_KEY = (((1,), (1,)), ((), ()))  # [L, E] x [S, E] -> [L, S]

PreparedBias = Num[Array, "#batch #heads #rows columns"] | None
"""See `tpu_kernels.ops.attention.masks.prepared`."""
Seed = UInt32[Array, " 2"] | None
"""Key of the dropout; None without one."""


def lanes(x: Float32[Array, "rows lanes"], count: int) -> Float32[Array, "rows {count}"]:
    """``count`` lanes of a value that is the same in all of its `LANES`."""
    return jnp.tile(x, (1, -(-count // LANES)))[:, :count]


def _kernel(
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    bias_ref: Any,
    seed_ref: Any,
    out_ref: Any,
    logsumexp_ref: Any,
    top_ref: Any,
    total_ref: Any,
    sum_ref: Any,
    *,
    blocks: BlockGrid,
    scale: float,
    dropout: Dropout | None,
) -> None:
    head = pl.program_id(0), pl.program_id(1)
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _start() -> None:
        top_ref[...] = jnp.full_like(top_ref, -jnp.inf)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(blocks.runs(i, j))
    def _block() -> None:
        scores = lax.dot_general(
            query_ref[...], key_ref[...], QUERY_KEY, preferred_element_type=np.float32
        )
        scores = scores * scale
        if bias_ref is not None:
            scores = masks.applied(scores, bias_ref[...])
        scores = blocks.masked(scores, i, j)
        top = jnp.maximum(top_ref[...], jnp.max(scores, axis=1, keepdims=True))
        # Of a row without a score that counts, exponentials of zero less infinity: all are 0.
        finite = jnp.where(top == -jnp.inf, 0.0, top)
        shares = jnp.exp(scores - lanes(finite, blocks.block_columns))
        rest = jnp.exp(top_ref[...] - finite)
        top_ref[...] = top
        total_ref[...] = total_ref[...] * rest + jnp.sum(shares, axis=1, keepdims=True)
        value = value_ref[...]
        if dropout is not None:
            shares = dropout.applied(shares, dropout.keep_mask(seed_ref, head, blocks, i, j))
        product = lax.dot(shares.astype(value.dtype), value, preferred_element_type=np.float32)
        sum_ref[...] = sum_ref[...] * lanes(rest, product.shape[1]) + product

    @pl.when(j == pl.num_programs(3) - 1)
    def _end() -> None:
        total, top = total_ref[...], top_ref[...]
        divisor = jnp.where(total == 0, 1.0, total)
        out_ref[...] = (sum_ref[...] / lanes(divisor, sum_ref.shape[1])).astype(out_ref.dtype)
        logsumexp = jnp.log(total) + jnp.where(top == -jnp.inf, 0.0, top)
        logsumexp_ref[...] = logsumexp.T[:1, :]


def seed_spec(seed: Seed) -> pl.BlockSpec | None:
    """BlockSpec of the dropout's key."""
    return None if seed is None else pl.BlockSpec(memory_space=pltpu.SMEM)


Index = Callable[..., tuple[Any, ...]]


def by_rows(blocks: BlockGrid, group: int) -> tuple[Index, Index, Index]:
    """BlockSpecs of queries, keys and the bias, for a grid of blocks of queries, then keys.

    Args:
        blocks: Of the scores.
        group: Number of heads of the queries that share one of the keys.
    """

    def of_rows(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b, h, i, 0

    def of_keys(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b, lax.div(h, group), blocks.column_block(i, j), 0

    def of_bias(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b, h, i, blocks.column_block(i, j)

    return of_rows, of_keys, of_bias


def forward(
    query: Float[Array, "batch heads rows head_size"],
    key: Float[Array, "batch key_heads columns head_size"],
    value: Float[Array, "batch key_heads columns value_size"],
    bias: PreparedBias,
    seed: Seed,
    blocks: BlockGrid,
    scale: float,
    dropout: Dropout | None,
) -> tuple[
    Float[Array, "batch heads rows value_size"],
    Float32[Array, "batch heads 1 rows"],
]:
    """Attention of arrays that are filled up to blocks.

    Args:
        query: ``blocks.padded_rows`` rows.
        key: ``blocks.padded_columns`` columns. As many heads of the query, in order, share a head
            of the keys.
        value: As many as keys.
        bias: See `tpu_kernels.ops.attention.masks.prepared`.
        seed: Key of the dropout; None without one.
        blocks: Of the scores.
        scale: Of the scores.
        dropout: Dropout of the probabilities.

    Returns:
        The result, and the logarithms of the rows' sums of exponentials.
    """
    batch, heads, _, size = query.shape
    group, value_size = heads // key.shape[1], value.shape[3]
    rows, columns = blocks.block_rows, blocks.block_columns

    of_rows, of_keys, of_bias = by_rows(blocks, group)

    made: tuple[Array, Array] = pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, scale=scale, dropout=dropout),
        grid=(batch, heads, blocks.row_blocks, blocks.seen_column_blocks),
        in_specs=[
            pl.BlockSpec((None, None, rows, size), of_rows),
            pl.BlockSpec((None, None, columns, size), of_keys),
            pl.BlockSpec((None, None, columns, value_size), of_keys),
            masks.spec(bias, blocks, of_bias),
            seed_spec(seed),
        ],
        out_specs=[
            pl.BlockSpec((None, None, rows, value_size), of_rows),
            pl.BlockSpec((None, None, 1, rows), lambda b, h, i, j: (b, h, 0, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((*query.shape[:3], value_size), query.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, blocks.padded_rows), np.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((rows, LANES), FLOAT32),
            pltpu.VMEM((rows, LANES), FLOAT32),
            pltpu.VMEM((rows, value_size), FLOAT32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        name=KERNEL_FORWARD,
    )(query, key, value, bias, seed)
    return made
