"""The kernels of attention's backward pass (FlashAttention-2, algorithm 2, in parts).

Each computes the scores anew, and the probabilities from the logarithms of the rows' sums. One has
a block of queries and meets the keys; one has a block of keys and meets the queries of all heads
that share it, with the scores transposed; one has a block of a bias and meets the batches and heads
that it is added to.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_core.array_types import Float, Float32, Num
from tpu_kernels.ops.attention import masks
from tpu_kernels.ops.attention.blocks import BlockGrid
from tpu_kernels.ops.attention.dropout import Dropout
from tpu_kernels.ops.attention.flash_forward import (
    FLOAT32,
    QUERY_KEY,
    Index,
    PreparedBias,
    Seed,
    by_rows,
    seed_spec,
)
from tpu_kernels.ops.attention.overloads import KERNEL_OF_BIAS, KERNEL_OF_KEYS, KERNEL_OF_QUERY

Operands = tuple[
    Float[Array, "batch heads rows head_size"],
    Float[Array, "batch key_heads columns head_size"],
    Float[Array, "batch key_heads columns value_size"],
    Float[Array, "batch heads rows value_size"],
    Float32[Array, "batch heads 1 rows"],
    Float32[Array, "batch heads 1 rows"],
]
"""Query, key, value, the result's gradient, logarithms of sums, and dots of result and gradient.

Rows and columns are filled up to blocks, as of `flash_forward.forward`; where a row has no score
that counts, the logarithm is 0.
"""


@dataclass(frozen=True, slots=True)
class Scores:
    """Terms of the scores beside query and key.

    Attributes:
        blocks: Sizes of the blocks.
        scale: Factor of the scores.
        dropout: Dropout of the probabilities.
    """

    blocks: BlockGrid
    scale: float
    dropout: Dropout | None


def _product(
    a: Float[Array, "rows k"], b: Float[Array, "k columns"]
) -> Float32[Array, "rows columns"]:
    return lax.dot(a.astype(b.dtype), b, preferred_element_type=np.float32)


def _scores(a: Any, b: Any) -> Float32[Array, "rows columns"]:
    return lax.dot_general(a[...], b[...], QUERY_KEY, preferred_element_type=np.float32)


def _slopes(
    refs: tuple[Any, ...], head: tuple[Any, Any], i: Any, j: Any, of: Scores, row_axis: int = 0
) -> tuple[Float32[Array, "rows columns"], Float32[Array, "rows columns"]]:
    """A block of the probabilities that meet the values, and the gradients of its scores.

    Args:
        refs: Of the operands, the bias and the seed.
        head: Batch, and head of the query.
        i, j: Of queries and of keys.
        of: The scores.
        row_axis: 1 where each query has a column.
    """
    query, key, value, grad, logsumexp, delta, bias, seed = refs
    if row_axis:
        scores, slopes = _scores(key, query), _scores(value, grad)
        sums, dots = logsumexp[...], delta[...]
    else:
        scores, slopes = _scores(query, key), _scores(grad, value)
        sums, dots = (jnp.expand_dims(x[0], -1) for x in (logsumexp, delta))
    scores = scores * of.scale
    if bias is not None:
        scores = masks.applied(scores, bias[...], row_axis=row_axis)
    scores = of.blocks.masked(scores, i, j, row_axis=row_axis)
    shares = jnp.exp(scores - sums)
    if of.dropout is None:
        return shares, shares * (slopes - dots)
    kept = of.dropout.keep_mask(seed, head, of.blocks, i, j, row_axis)
    return of.dropout.applied(shares, kept), shares * (of.dropout.applied(slopes, kept) - dots)


def _query_kernel(*refs: Any, of: Scores) -> None:
    *refs_in, out_ref, sum_ref = refs
    b, h, i, j = (pl.program_id(axis) for axis in range(4))

    @pl.when(j == 0)
    def _start() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(of.blocks.runs(i, j))
    def _block() -> None:
        _, slopes = _slopes(tuple(refs_in), (b, h), i, j, of)
        sum_ref[...] += _product(slopes, refs_in[1][...])

    @pl.when(j == pl.num_programs(3) - 1)
    def _end() -> None:
        out_ref[...] = (sum_ref[...] * of.scale).astype(out_ref.dtype)


def _specs(
    operands: Operands,
    bias: PreparedBias,
    seed: Seed,
    blocks: BlockGrid,
    indices: tuple[Index, ...],
) -> list[Any]:
    """Blocks of the operands and the bias, where rows, keys, bias and rows' sums are."""
    of_rows, of_keys, of_bias, of_sums = indices
    size, value_size = operands[0].shape[3], operands[2].shape[3]
    rows, columns = blocks.block_rows, blocks.block_columns
    return [
        pl.BlockSpec((None, None, rows, size), of_rows),
        pl.BlockSpec((None, None, columns, size), of_keys),
        pl.BlockSpec((None, None, columns, value_size), of_keys),
        pl.BlockSpec((None, None, rows, value_size), of_rows),
        pl.BlockSpec((None, None, 1, rows), of_sums),
        pl.BlockSpec((None, None, 1, rows), of_sums),
        masks.spec(bias, blocks, of_bias),
        seed_spec(seed),
    ]


def of_query(
    operands: Operands, bias: PreparedBias, seed: Seed, of: Scores
) -> Float[Array, "batch heads rows head_size"]:
    """The gradient of the query.

    Args:
        operands: See `Operands`.
        bias: See `tpu_kernels.ops.attention.masks.prepared`.
        seed: Key of the dropout; None without one.
        of: The scores.
    """
    query, key = operands[:2]
    batch, heads, _, size = query.shape
    blocks, rows = of.blocks, of.blocks.block_rows

    of_rows, of_keys, of_bias = by_rows(blocks, heads // key.shape[1])

    def of_sums(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b, h, 0, i

    made: Array = pl.pallas_call(
        functools.partial(_query_kernel, of=of),
        grid=(batch, heads, blocks.row_blocks, blocks.seen_column_blocks),
        in_specs=_specs(operands, bias, seed, blocks, (of_rows, of_keys, of_bias, of_sums)),
        out_specs=pl.BlockSpec((None, None, rows, size), of_rows),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        scratch_shapes=[pltpu.VMEM((rows, size), FLOAT32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        name=KERNEL_OF_QUERY,
    )(*operands, bias, seed)
    return made


def _key_kernel(*refs: Any, of: Scores, group: int) -> None:
    *refs_in, key_out_ref, value_out_ref, key_sum_ref, value_sum_ref = refs
    b, h, j, g, i = (pl.program_id(axis) for axis in range(5))

    @pl.when(jnp.logical_and(g == 0, i == 0))
    def _start() -> None:
        key_sum_ref[...] = jnp.zeros_like(key_sum_ref)
        value_sum_ref[...] = jnp.zeros_like(value_sum_ref)

    @pl.when(of.blocks.runs(i, j))
    def _block() -> None:
        head = b, h * group + g
        shares, slopes = _slopes(tuple(refs_in), head, i, j, of, row_axis=1)
        value_sum_ref[...] += _product(shares, refs_in[3][...])
        key_sum_ref[...] += _product(slopes, refs_in[0][...])

    @pl.when(jnp.logical_and(g == pl.num_programs(3) - 1, i == pl.num_programs(4) - 1))
    def _end() -> None:
        key_out_ref[...] = (key_sum_ref[...] * of.scale).astype(key_out_ref.dtype)
        value_out_ref[...] = value_sum_ref[...].astype(value_out_ref.dtype)


def of_key_and_value(
    operands: Operands, bias: PreparedBias, seed: Seed, of: Scores
) -> tuple[
    Float[Array, "batch key_heads columns head_size"],
    Float[Array, "batch key_heads columns value_size"],
]:
    """The gradients of key and value, summed over the queries' heads that share them.

    Args:
        operands, bias, seed, of: As of `of_query`.
    """
    query, key, value = operands[:3]
    batch, key_heads, _, size = key.shape
    group, value_size = query.shape[1] // key_heads, value.shape[3]
    blocks, columns = of.blocks, of.blocks.block_columns

    def of_keys(b: Any, h: Any, j: Any, g: Any, i: Any) -> tuple[Any, ...]:
        return b, h, j, 0

    def of_bias(b: Any, h: Any, j: Any, g: Any, i: Any) -> tuple[Any, ...]:
        return b, h * group + g, blocks.row_block(i, j), j

    def of_rows(b: Any, h: Any, j: Any, g: Any, i: Any) -> tuple[Any, ...]:
        return b, h * group + g, blocks.row_block(i, j), 0

    def of_sums(b: Any, h: Any, j: Any, g: Any, i: Any) -> tuple[Any, ...]:
        return b, h * group + g, 0, blocks.row_block(i, j)

    made: tuple[Array, Array] = pl.pallas_call(
        functools.partial(_key_kernel, of=of, group=group),
        grid=(batch, key_heads, blocks.column_blocks, group, blocks.row_blocks),
        in_specs=_specs(operands, bias, seed, blocks, (of_rows, of_keys, of_bias, of_sums)),
        out_specs=[
            pl.BlockSpec((None, None, columns, size), of_keys),
            pl.BlockSpec((None, None, columns, value_size), of_keys),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(key.shape, key.dtype),
            jax.ShapeDtypeStruct(value.shape, value.dtype),
        ],
        scratch_shapes=[
            pltpu.VMEM((columns, size), FLOAT32),
            pltpu.VMEM((columns, value_size), FLOAT32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary")
        ),
        name=KERNEL_OF_KEYS,
    )(*operands, bias, seed)
    return made


def _bias_kernel(*refs: Any, of: Scores, shared: tuple[int, int]) -> None:
    *refs_in, out_ref, sum_ref = refs
    b, h, i, j, m, n = (pl.program_id(axis) for axis in range(6))

    @pl.when(jnp.logical_and(m == 0, n == 0))
    def _start() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(of.blocks.runs(i, j))
    def _block() -> None:
        _, slopes = _slopes(tuple(refs_in), (b * shared[0] + m, h * shared[1] + n), i, j, of)
        sum_ref[...] += slopes

    @pl.when(jnp.logical_and(m == pl.num_programs(4) - 1, n == pl.num_programs(5) - 1))
    def _end() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def of_bias(
    operands: Operands,
    bias: Num[Array, "bias_batch bias_heads #rows columns"],
    seed: Seed,
    of: Scores,
    dtype: Any,
) -> Float[Array, "bias_batch bias_heads rows columns"]:
    """The gradient of a bias that has a row for each query, summed over what shares it.

    Args:
        operands, bias, seed, of: As of `of_query`.
        dtype: Of the result.
    """
    query, key = operands[:2]
    group = query.shape[1] // key.shape[1]
    blocks = of.blocks
    # How many batches and heads share a block of the bias.
    shared = query.shape[0] // bias.shape[0], query.shape[1] // bias.shape[1]

    def place(index: Index) -> Index:
        def placed(b: Any, h: Any, i: Any, j: Any, m: Any, n: Any) -> tuple[Any, ...]:
            return index(b * shared[0] + m, h * shared[1] + n, i, j)

        return placed

    def of_sums(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b, h, 0, i

    of_rows, of_keys, of_mask = by_rows(blocks, group)
    indices = tuple(map(place, (of_rows, of_keys, of_mask, of_sums)))
    block = blocks.block_rows, blocks.block_columns
    shape = (*bias.shape[:2], blocks.padded_rows, blocks.padded_columns)
    made: Array = pl.pallas_call(
        functools.partial(_bias_kernel, of=of, shared=shared),
        grid=(*bias.shape[:2], blocks.row_blocks, blocks.column_blocks, *shared),
        in_specs=_specs(operands, bias, seed, blocks, indices),
        out_specs=pl.BlockSpec((None, None, *block), lambda b, h, i, j, m, n: (b, h, i, j)),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        scratch_shapes=[pltpu.VMEM(block, FLOAT32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 4 + ("arbitrary",) * 2
        ),
        name=KERNEL_OF_BIAS,
    )(*operands, bias, seed)
    return made
