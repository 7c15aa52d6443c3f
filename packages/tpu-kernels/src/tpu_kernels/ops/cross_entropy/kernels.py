"""The kernels of the loss.

The softmax of logits times the weights is attention with the weights as keys and values: the
forward kernel (FlashAttention-2, algorithm 1) gives the sums of exponentials, and with them what
gradients of hidden states need. The backward kernel computes a block of logits again, by columns.
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

from tpu_core.array_types import Float, Float32, Int32
from tpu_kernels.ops.attention.blocks import LANES
from tpu_kernels.ops.attention.flash_forward import FLOAT32, QUERY_KEY, lanes
from tpu_kernels.ops.cross_entropy.loops import capped, sloped


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Of the logits, and what they may take.

    Attributes:
        kept: Rows of the operand that stays while the other passes by: tokens of the forward
            kernel, columns of the backward kernel.
        passing: Rows of the other one.
        vmem: Bytes of VMEM that the kernels may use.
    """

    kept: int
    passing: int
    vmem: int


def _blocks_of(length: int, block: int) -> int:
    return -(-length // block)


def _forward_kernel(
    hidden_ref: Any,
    weight_ref: Any,
    logsumexp_ref: Any,
    *refs: Any,
    columns: int,
    softcap: float,
) -> None:
    # Of the expected weights, which may not be wanted: result before, scratch memory behind.
    mean_ref, top_ref, total_ref, sum_ref = refs if len(refs) == 4 else (None, *refs, None)
    j, last = pl.program_id(1), pl.num_programs(1) - 1
    block = weight_ref.shape[0]

    @pl.when(j == 0)
    def _start() -> None:
        top_ref[...] = jnp.full_like(top_ref, -jnp.inf)
        total_ref[...] = jnp.zeros_like(total_ref)
        if sum_ref is not None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

    def add(weight: Float[Array, "columns features"], count: int) -> None:
        logits = lax.dot_general(
            hidden_ref[...], weight, QUERY_KEY, preferred_element_type=np.float32
        )
        logits, slope = capped(logits, softcap)
        if count < block:
            places = lax.broadcasted_iota(np.int32, logits.shape, 1)
            logits = jnp.where(places < count, logits, -jnp.inf)
        top = jnp.maximum(top_ref[...], jnp.max(logits, axis=1, keepdims=True))
        shares = jnp.exp(logits - lanes(top, block))
        rest = jnp.exp(top_ref[...] - top)
        top_ref[...] = top
        total_ref[...] = total_ref[...] * rest + jnp.sum(shares, axis=1, keepdims=True)
        if sum_ref is not None:
            product = lax.dot(
                sloped(shares, slope).astype(weight.dtype),
                weight,
                preferred_element_type=np.float32,
            )
            sum_ref[...] = sum_ref[...] * lanes(rest, product.shape[1]) + product

    left = columns % block
    if not left:
        add(weight_ref[...], block)
    else:
        pl.when(j < last)(lambda: add(weight_ref[...], block))

        @pl.when(j == last)
        def _part() -> None:
            # Behind the last column there may be anything, and 0 times that is not 0.
            rows = lax.broadcasted_iota(np.int32, weight_ref.shape, 0)
            weight = weight_ref[...].astype(np.float32)
            add(jnp.where(rows < left, weight, 0.0).astype(weight_ref.dtype), left)

    @pl.when(j == last)
    def _end() -> None:
        logsumexp = jnp.log(total_ref[...]) + top_ref[...]
        logsumexp_ref[...] = logsumexp.T[:1, :]
        if mean_ref is not None:
            mean = sum_ref[...] / lanes(total_ref[...], sum_ref.shape[1])
            mean_ref[...] = mean.astype(mean_ref.dtype)


def forward(
    hidden: Float[Array, "tokens features"],
    weight: Float[Array, "vocabulary features"],
    softcap: float,
    blocks: TileSizes,
    means: bool,
) -> (
    tuple[Float32[Array, "1 tokens"], Float[Array, "tokens features"]]
    | tuple[Float32[Array, "1 tokens"]]
):
    """The logarithms of the sums of exponentials, and the expected weights.

    Args:
        hidden: Hidden states, whole blocks of tokens.
        weight: Of the layer that gives the logits.
        softcap: Of the logits, 0 for none.
        blocks: Of tokens, and of columns.
        means: Whether the expected weights are wanted.

    Returns:
        The logarithms in float32; in the dtype of ``hidden`` the weights, times the slopes of the
        cap, that the shares of a row's softmax give.
    """
    tokens, features = hidden.shape
    columns = weight.shape[0]
    rows = pl.BlockSpec((blocks.kept, features), lambda i, j: (i, 0))
    sums = [pltpu.VMEM((blocks.kept, features), FLOAT32)] if means else []
    made: Any = pl.pallas_call(
        functools.partial(_forward_kernel, columns=columns, softcap=softcap),
        grid=(tokens // blocks.kept, _blocks_of(columns, blocks.passing)),
        in_specs=[rows, pl.BlockSpec((blocks.passing, features), lambda i, j: (j, 0))],
        out_specs=[
            pl.BlockSpec((1, blocks.kept), lambda i, j: (0, i)),
            *([rows] if means else []),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((1, tokens), np.float32),
            *([jax.ShapeDtypeStruct(hidden.shape, hidden.dtype)] if means else []),
        ],
        scratch_shapes=[
            pltpu.VMEM((blocks.kept, LANES), FLOAT32),
            pltpu.VMEM((blocks.kept, LANES), FLOAT32),
            *sums,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=blocks.vmem
        ),
        name="cross_entropy",
    )(hidden, weight)
    return made


def _backward_kernel(
    hidden_ref: Any,
    weight_ref: Any,
    logsumexp_ref: Any,
    target_ref: Any,
    grad_ref: Any,
    out_ref: Any,
    sum_ref: Any,
    *,
    softcap: float,
) -> None:
    j, i = pl.program_id(0), pl.program_id(1)

    @pl.when(i == 0)
    def _start() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    hidden = hidden_ref[...]
    logits = lax.dot_general(weight_ref[...], hidden, QUERY_KEY, preferred_element_type=np.float32)
    logits, slope = capped(logits, softcap)
    columns = lax.broadcasted_iota(np.int32, logits.shape, 0) + j * weight_ref.shape[0]
    shares = jnp.exp(logits - logsumexp_ref[...])
    shares = jnp.where(columns == target_ref[...], shares - 1.0, shares)
    shares = sloped(shares * grad_ref[...], slope)
    sum_ref[...] += lax.dot(shares.astype(hidden.dtype), hidden, preferred_element_type=np.float32)

    @pl.when(i == pl.num_programs(1) - 1)
    def _end() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def backward(
    hidden: Float[Array, "tokens features"],
    weight: Float[Array, "vocabulary features"],
    logsumexp: Float32[Array, "1 tokens"],
    target: Int32[Array, "1 tokens"],
    grad: Float32[Array, "1 tokens"],
    softcap: float,
    blocks: TileSizes,
) -> Float[Array, "vocabulary features"]:
    """The gradient of the weights.

    Args:
        hidden: Hidden states, whole blocks of tokens.
        weight: Of the layer that gives the logits.
        logsumexp: As `forward` gives it.
        target: Labels.
        grad: Of the losses.
        softcap: Of the logits, 0 for none.
        blocks: Of columns, and of tokens.
    """
    tokens, features = hidden.shape
    columns = weight.shape[0]
    of_columns = pl.BlockSpec((blocks.kept, features), lambda j, i: (j, 0))
    of_token = pl.BlockSpec((1, blocks.passing), lambda j, i: (0, i))
    made: Array = pl.pallas_call(
        functools.partial(_backward_kernel, softcap=softcap),
        grid=(_blocks_of(columns, blocks.kept), tokens // blocks.passing),
        in_specs=[
            pl.BlockSpec((blocks.passing, features), lambda j, i: (i, 0)),
            of_columns,
            of_token,
            of_token,
            of_token,
        ],
        out_specs=of_columns,
        out_shape=jax.ShapeDtypeStruct(weight.shape, weight.dtype),
        scratch_shapes=[pltpu.VMEM((blocks.kept, features), FLOAT32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=blocks.vmem
        ),
        name="cross_entropy_gradient_of_weight",
    )(hidden, weight, logsumexp, target, grad)
    return made
