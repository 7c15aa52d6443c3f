"""Attention by flash attention kernels: scores stay in the chip's own memory.

What passes between forward and backward is the logarithm of the sum of exponentials, as in the
plain lowering: either can follow on the other.
"""

from __future__ import annotations

import functools
import math
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_core.lowering import attention as plain
from tpu_core.lowering.implementations import Target
from tpu_kernels.ops.attention import divided, flash_backward, flash_forward, masks
from tpu_kernels.ops.attention.arguments import AttentionArguments
from tpu_kernels.ops.attention.blocks import Blocks
from tpu_kernels.ops.attention.names import BACKWARD, FORWARD
from tpu_kernels.ops.mosaic import calling
from tpu_kernels.ops.registry import Implementation, Rule
from tpu_kernels.ops.rules import HAS_BFLOAT16

_LARGEST_HEAD = 512
# Among the arguments of the backward pass that follow on the sums.
_IS_CAUSAL = 5


def _blocks(query: jax.Array, key_: jax.Array, value: jax.Array, is_causal: bool) -> Blocks:
    size = max(query.shape[3], value.shape[3]) * query.dtype.itemsize
    return Blocks.of(query.shape[2], key_.shape[2], size, is_causal)


def _products(query: jax.Array, blocks: Blocks, *sizes: int) -> int:
    """Floating point operations of products with the scores that are computed."""
    return 2 * query.shape[0] * query.shape[1] * blocks.computed * sum(sizes)


def _scale(query: jax.Array, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)


def _filled(x: jax.Array, length: int, axis: int = 2) -> jax.Array:
    """``x`` with zeros up to a length."""
    widths = [(0, length - n if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, widths)


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[jax.Array, jax.Array]:
    """The result, and the logarithms of the sums of exponentials."""
    blocks = _blocks(query, key, value, is_causal)
    operands = (
        _filled(query, blocks.padded_rows),
        _filled(key, blocks.padded_columns),
        _filled(value, blocks.padded_columns),
        masks.prepared(bias, blocks),
    )
    with calling(query.dtype, _products(query, blocks, query.shape[3], value.shape[3])):
        out, logsumexp = flash_forward.forward(*operands, blocks, _scale(query, scale))
    return out[:, :, : blocks.rows], logsumexp[:, :, 0, : blocks.rows]


def _backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    grad: jax.Array,
    output: jax.Array,
    logsumexp: jax.Array,
    *,
    is_causal: bool,
    scale: float | None,
    of_query: bool,
    of_keys: bool,
) -> list[jax.Array]:
    """The gradients that are asked for, that of value with that of key."""
    blocks, factor = _blocks(query, key, value, is_causal), _scale(query, scale)
    sizes = query.shape[3], value.shape[3]
    bias = masks.prepared(bias, blocks)
    rows, columns = blocks.padded_rows, blocks.padded_columns
    delta = (output.astype(np.float32) * grad.astype(np.float32)).sum(axis=-1)
    operands = (
        _filled(query, rows),
        _filled(key, columns),
        _filled(value, columns),
        _filled(grad, rows),
        _filled(jnp.where(logsumexp == -jnp.inf, 0.0, logsumexp)[:, :, None], rows, axis=3),
        _filled(delta[:, :, None], rows, axis=3),
    )
    made = []
    if of_query:
        with calling(query.dtype, _products(query, blocks, *sizes, sizes[0])):
            own = flash_backward.of_query(operands, bias, blocks, factor)
        made.append(own[:, :, : blocks.rows])
    if of_keys:
        with calling(query.dtype, _products(query, blocks, *sizes, *sizes)):
            both = flash_backward.of_key_and_value(operands, bias, blocks, factor)
        made += [x[:, :, : blocks.columns] for x in both]
    return made


def forward(
    query: jax.Array,
    key_: jax.Array,
    value: jax.Array,
    attn_bias: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    key: None = None,
) -> tuple[Any, ...]:
    """As `tpu_core.lowering.attention.attention`, for what `FLASH` takes."""
    operands = (query, key_, value, attn_bias)
    if divided.is_asked():
        stand_in = divided.marked(operands)
        return plain.attention(*stand_in, dropout_p, is_causal, scale=scale)
    function = functools.partial(_forward, is_causal=is_causal, scale=scale)
    out, logsumexp = divided.on_parts(function, operands, (4, 3))
    seed = jnp.zeros((), np.int64)
    return out, logsumexp, None, None, None, None, seed, seed, None


def backward(
    grad_out: jax.Array,
    query: jax.Array,
    key_: jax.Array,
    value: jax.Array,
    attn_bias: jax.Array | None,
    grad_input_mask: list[bool],
    output: jax.Array,
    logsumexp: jax.Array,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """As `tpu_core.lowering.attention.attention_backward`, for what `FLASH` takes."""
    operands = (query, key_, value, attn_bias, grad_out, output, logsumexp)
    if divided.is_asked():
        q, k, v, bias, grad, out, sums = divided.marked(operands)
        return plain.attention_backward(
            grad, q, k, v, bias, grad_input_mask, out, sums, *rest, scale=scale
        )
    of_query, of_keys = grad_input_mask[0], grad_input_mask[1] or grad_input_mask[2]
    function = functools.partial(
        _backward,
        is_causal=rest[_IS_CAUSAL],
        scale=scale,
        of_query=of_query,
        of_keys=of_keys,
    )
    made = divided.on_parts(function, operands, (4,) * (of_query + 2 * of_keys))
    grads = [*([] if of_query else [None]), *made, *([] if of_keys else [None, None])]
    masked = [grad if wanted else None for grad, wanted in zip(grads, grad_input_mask)]
    if attn_bias is None or attn_bias.dtype == np.bool_:
        return *masked, None
    return *masked, jnp.zeros_like(attn_bias)


def _four_dims(a: AttentionArguments, target: Target) -> bool:
    shapes = (a.query, a.key, a.value)
    return all(len(s) == 4 and 0 not in s and s[0] == a.query[0] for s in shapes)


def _head_sizes(a: AttentionArguments, target: Target) -> bool:
    return a.query[3] == a.key[3] and max(a.query[3], a.value[3]) <= _LARGEST_HEAD


def _heads(a: AttentionArguments, target: Target) -> bool:
    return a.key[1] == a.value[1] and a.query[1] % a.key[1] == 0


FLASH = Implementation(
    "pallas",
    "Flash attention: memory grows with the lengths, not with their product. Queries that share "
    "keys read them where they are; lengths are filled up to whole blocks.",
    platforms=("tpu",),
    dtypes=("bfloat16", "float32"),
    rules=(
        Rule(
            "Query, key and value have the dimensions (batch, heads, length, head size), none of "
            "them 0, and the same batch.",
            _four_dims,
        ),
        Rule(
            f"Query and key have the same head size, and none is above {_LARGEST_HEAD}.",
            _head_sizes,
        ),
        Rule("The heads of the query are a multiple of those of key and value.", _heads),
        Rule(
            "Key and value have the same length.",
            lambda a, target: a.key[2] == a.value[2],
        ),
        Rule(
            "No gradient of the mask is asked for: it is as large as the scores.",
            lambda a, target: not a.bias_gradient,
        ),
        Rule(
            "There is no dropout: its random numbers, which forward and backward share, are not "
            "drawn in kernels.",
            lambda a, target: a.dropout == 0,
        ),
        Rule(
            "The scale is a number, not a tensor.",
            lambda a, target: a.scale is None or isinstance(a.scale, (int, float)),
        ),
        Rule(
            "The program is for one device, or divided by `tpu_compile.aot`: batches and heads "
            "then stay divided as they come, and lengths are gathered.",
            lambda a, target: target.devices == 1 or target.division is not None,
        ),
        HAS_BFLOAT16,
    ),
    functions=MappingProxyType({FORWARD: forward, BACKWARD: backward}),
)
