"""The kernels on arrays of any length, which are filled up to whole blocks."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from tpu_core.array_types import Float, Float32, Shaped
from tpu_core.extend import Target
from tpu_kernels.ops.attention import choice, flash_backward, flash_forward, masks
from tpu_kernels.ops.attention.blocks import BlockGrid
from tpu_kernels.ops.attention.dropout import Dropout
from tpu_kernels.ops.attention.flash_backward import Scores
from tpu_kernels.ops.attention.flash_forward import PreparedBias, Seed
from tpu_kernels.ops.mosaic import calling

Operands = tuple[
    Float[Array, "batch heads queries head_size"],
    Float[Array, "batch key_heads keys head_size"],
    Float[Array, "batch key_heads keys value_size"],
    Shaped[Array, " ..."] | None,
]
"""Query, key, value, and a bias or None."""

BackwardOperands = tuple[
    Float[Array, "batch heads queries head_size"],
    Float[Array, "batch key_heads keys head_size"],
    Float[Array, "batch key_heads keys value_size"],
    Shaped[Array, " ..."] | None,
    Float[Array, "batch heads queries value_size"],
    Float[Array, "batch heads queries value_size"],
    Float32[Array, "batch heads queries"],
]
"""Those of `forward`, the result's gradient, and its results."""


def scores(
    kernel: str,
    operands: Operands | BackwardOperands,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: Dropout | None = None,
) -> Scores:
    """The scores of a call, in the blocks that suit a kernel.

    Args:
        kernel: Its name.
        operands: Of `forward` or of a gradient.
        is_causal: Whether a query meets keys up to its own place only.
        scale: Of the scores; None for the default.
        dropout: Dropout of the probabilities.
    """
    query, key, value, bias = operands[:4]
    blocks = choice.blocks(
        kernel,
        Target.current().kind,
        np.dtype(query.dtype).name,
        (query.shape[2], key.shape[2]),
        (query.shape[3], value.shape[3]),
        is_causal,
        has_bias=bias is not None,
        has_dropout=dropout is not None,
    )
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    return Scores(blocks, factor, dropout)


def forward(
    operands: Operands, seed: Seed, of: Scores
) -> tuple[Float[Array, "batch heads queries value_size"], Float32[Array, "batch heads queries"]]:
    """The result, and the logarithms of the sums of exponentials.

    Args:
        operands: See `Operands`.
        seed: Key of the dropout.
        of: See `scores`.
    """
    query, key, value, bias = operands
    blocks = of.blocks
    filled = (
        _filled(query, blocks.padded_rows),
        _filled(key, blocks.padded_columns),
        _filled(value, blocks.padded_columns),
        masks.prepared(bias, blocks),
        seed,
    )
    with calling(query.dtype, _products(query, blocks, query.shape[3], value.shape[3])):
        out, logsumexp = flash_forward.forward(*filled, blocks, of.scale, of.dropout)
    return out[:, :, : blocks.rows], logsumexp[:, :, 0, : blocks.rows]


def of_query(
    operands: BackwardOperands, seed: Seed, of: Scores
) -> Float[Array, "batch heads queries head_size"]:
    """The gradient of the query.

    Args:
        operands: See `BackwardOperands`.
        seed, of: As of `forward`.
    """
    query, value = operands[0], operands[2]
    with calling(query.dtype, _products(query, of.blocks, 2 * query.shape[3], value.shape[3])):
        made = flash_backward.of_query(*_filled_operands(operands, of.blocks), seed, of)
    return made[:, :, : of.blocks.rows]


def of_key_and_value(
    operands: BackwardOperands, seed: Seed, of: Scores
) -> tuple[
    Float[Array, "batch key_heads keys head_size"],
    Float[Array, "batch key_heads keys value_size"],
]:
    """The gradients of key and value.

    Args:
        operands, seed, of: As of `of_query`.
    """
    query, value = operands[0], operands[2]
    with calling(query.dtype, _products(query, of.blocks, 2 * query.shape[3], 2 * value.shape[3])):
        made = flash_backward.of_key_and_value(*_filled_operands(operands, of.blocks), seed, of)
    of_key, of_value = (x[:, :, : of.blocks.columns] for x in made)
    return of_key, of_value


def of_bias(operands: BackwardOperands, seed: Seed, of: Scores) -> Float[Array, "... queries keys"]:
    """The gradient of the bias, which has a row for each query and a column for each key.

    Args:
        operands, seed, of: As of `of_query`.
    """
    query, value, bias = operands[0], operands[2], operands[3]
    filled, prepared = _filled_operands(operands, of.blocks)
    assert bias is not None and prepared is not None  # a gradient of it is wanted
    with calling(query.dtype, _products(query, of.blocks, query.shape[3], value.shape[3])):
        made = flash_backward.of_bias(filled, prepared, seed, of, bias.dtype)
    return made[:, :, : of.blocks.rows, : of.blocks.columns].reshape(bias.shape)


def _filled_operands(
    operands: BackwardOperands, blocks: BlockGrid
) -> tuple[flash_backward.Operands, PreparedBias]:
    query, key, value, bias, grad, output, logsumexp = operands
    rows, columns = blocks.padded_rows, blocks.padded_columns
    delta = (output.astype(np.float32) * grad.astype(np.float32)).sum(axis=-1)
    filled = (
        _filled(query, rows),
        _filled(key, columns),
        _filled(value, columns),
        _filled(grad, rows),
        _filled(jnp.where(logsumexp == -jnp.inf, 0.0, logsumexp)[:, :, None], rows, axis=3),
        _filled(delta[:, :, None], rows, axis=3),
    )
    return filled, masks.prepared(bias, blocks)


def _products(
    query: Float[Array, "batch heads queries head_size"], blocks: BlockGrid, *sizes: int
) -> int:
    """Floating point operations of products with the scores that are computed."""
    return 2 * query.shape[0] * query.shape[1] * blocks.computed * sum(sizes)


def _filled(
    x: Float[Array, "batch heads _ _"], length: int, axis: int = 2
) -> Float[Array, "batch heads _ _"]:
    """``x`` with zeros up to a length."""
    widths = [(0, length - n if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, widths)
