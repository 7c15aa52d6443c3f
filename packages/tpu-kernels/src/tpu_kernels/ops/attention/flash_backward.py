"""The kernels of attention's backward pass (FlashAttention-2, algorithm 2, in two parts).

Each computes the scores anew, and the probabilities from the logarithms of the rows' sums. One has
a block of queries and meets the keys; one has a block of keys and meets the queries of all heads
that share it, with the scores transposed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.ops.attention import masks
from tpu_kernels.ops.attention.blocks import Blocks
from tpu_kernels.ops.attention.flash_forward import FLOAT32, QUERY_KEY, Index, by_rows

Operands = tuple[jax.Array, ...]
"""Query, key, value, the result's gradient, logarithms of sums, and dots of result and gradient.

The first four as of `flash_forward.forward`, the others as the logarithms that it returns; where a
row has no score that counts, the logarithm is 0.
"""


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot(a.astype(b.dtype), b, preferred_element_type=np.float32)


def _scores(a: Any, b: Any) -> jax.Array:
    return lax.dot_general(a[...], b[...], QUERY_KEY, preferred_element_type=np.float32)


def _query_kernel(
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    grad_ref: Any,
    logsumexp_ref: Any,
    delta_ref: Any,
    bias_ref: Any,
    out_ref: Any,
    sum_ref: Any,
    *,
    blocks: Blocks,
    scale: float,
) -> None:
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _start() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(blocks.runs(i, j))
    def _block() -> None:
        scores = _scores(query_ref, key_ref) * scale
        if bias_ref is not None:
            scores = masks.applied(scores, bias_ref[...])
        scores = blocks.masked(scores, i, j)
        shares = jnp.exp(scores - jnp.expand_dims(logsumexp_ref[0], -1))
        slopes = _scores(grad_ref, value_ref) - jnp.expand_dims(delta_ref[0], -1)
        sum_ref[...] += _product(shares * slopes, key_ref[...])

    @pl.when(j == pl.num_programs(3) - 1)
    def _end() -> None:
        out_ref[...] = (sum_ref[...] * scale).astype(out_ref.dtype)


def _specs(
    operands: Operands, bias: jax.Array | None, blocks: Blocks, indices: tuple[Index, ...]
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
    ]


def of_query(operands: Operands, bias: jax.Array | None, blocks: Blocks, scale: float) -> jax.Array:
    """The gradient of the query.

    Args:
        operands: See `Operands`.
        bias: See `tpu_kernels.ops.attention.masks.prepared`.
        blocks: Of the scores.
        scale: Of the scores.
    """
    query, key = operands[:2]
    batch, heads, _, size = query.shape
    group = heads // key.shape[1]
    rows = blocks.block_rows

    of_rows, of_keys, of_bias = by_rows(blocks, group)

    def of_sums(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b, h, 0, i

    made: jax.Array = pl.pallas_call(
        functools.partial(_query_kernel, blocks=blocks, scale=scale),
        grid=(batch, heads, blocks.row_blocks, blocks.seen_column_blocks),
        in_specs=_specs(operands, bias, blocks, (of_rows, of_keys, of_bias, of_sums)),
        out_specs=pl.BlockSpec((None, None, rows, size), of_rows),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        scratch_shapes=[pltpu.VMEM((rows, size), FLOAT32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        name="attention_gradient_of_query",
    )(*operands, bias)
    return made


def _key_kernel(
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    grad_ref: Any,
    logsumexp_ref: Any,
    delta_ref: Any,
    bias_ref: Any,
    key_out_ref: Any,
    value_out_ref: Any,
    key_sum_ref: Any,
    value_sum_ref: Any,
    *,
    blocks: Blocks,
    scale: float,
) -> None:
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when(jnp.logical_and(g == 0, i == 0))
    def _start() -> None:
        key_sum_ref[...] = jnp.zeros_like(key_sum_ref)
        value_sum_ref[...] = jnp.zeros_like(value_sum_ref)

    @pl.when(blocks.runs(i, j))
    def _block() -> None:
        scores = _scores(key_ref, query_ref) * scale
        if bias_ref is not None:
            scores = masks.applied(scores, bias_ref[...], row_axis=1)
        scores = blocks.masked(scores, i, j, row_axis=1)
        shares = jnp.exp(scores - logsumexp_ref[...])
        value_sum_ref[...] += _product(shares, grad_ref[...])
        slopes = _scores(value_ref, grad_ref) - delta_ref[...]
        key_sum_ref[...] += _product(shares * slopes, query_ref[...])

    @pl.when(jnp.logical_and(g == pl.num_programs(3) - 1, i == pl.num_programs(4) - 1))
    def _end() -> None:
        key_out_ref[...] = (key_sum_ref[...] * scale).astype(key_out_ref.dtype)
        value_out_ref[...] = value_sum_ref[...].astype(value_out_ref.dtype)


def of_key_and_value(
    operands: Operands, bias: jax.Array | None, blocks: Blocks, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The gradients of key and value, summed over the queries' heads that share them.

    Args:
        operands, bias, blocks, scale: As of `of_query`.
    """
    query, key, value = operands[:3]
    batch, key_heads, _, size = key.shape
    group, value_size = query.shape[1] // key_heads, value.shape[3]
    columns = blocks.block_columns

    def of_keys(b: Any, h: Any, j: Any, g: Any, i: Any) -> tuple[Any, ...]:
        return b, h, j, 0

    def of_bias(b: Any, h: Any, j: Any, g: Any, i: Any) -> tuple[Any, ...]:
        return b, h * group + g, blocks.row_block(i, j), j

    def of_rows(b: Any, h: Any, j: Any, g: Any, i: Any) -> tuple[Any, ...]:
        return b, h * group + g, blocks.row_block(i, j), 0

    def of_sums(b: Any, h: Any, j: Any, g: Any, i: Any) -> tuple[Any, ...]:
        return b, h * group + g, 0, blocks.row_block(i, j)

    made: tuple[jax.Array, jax.Array] = pl.pallas_call(
        functools.partial(_key_kernel, blocks=blocks, scale=scale),
        grid=(batch, key_heads, blocks.column_blocks, group, blocks.row_blocks),
        in_specs=_specs(operands, bias, blocks, (of_rows, of_keys, of_bias, of_sums)),
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
        name="attention_gradients_of_key_and_value",
    )(*operands, bias)
    return made
