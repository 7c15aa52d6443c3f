"""Attention by JAX's flash attention kernels: scores stay in the chip's own memory.

The kernels are those of `jax.experimental.pallas.ops.tpu.flash_attention`. Its public function
keeps to itself what its backward pass needs, and here forward and backward are two ops; so the
functions below it are called. What passes between the two ops is the logarithm of the sum of
exponentials, as in the plain lowering: either can follow on the other.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import flash_attention

from tpu_core.lowering.implementations import Target
from tpu_kernels.ops.attention.arguments import AttentionArguments
from tpu_kernels.ops.attention.names import BACKWARD, FORWARD
from tpu_kernels.ops.mosaic import calling
from tpu_kernels.ops.registry import Implementation, Rule

kernels: Any = flash_attention  # its functions have no annotations
# Largest first: larger blocks read keys and values fewer times, and larger ones still would not
# fit beside each other in 16 MiB of VMEM in the backward pass of float32.
_BLOCKS = (512, 256, 128)
_HEAD_SIZES = (64, 128)


def _block(length: int) -> int:
    return next(block for block in _BLOCKS if length % block == 0)


def _product(query: jax.Array, key_: jax.Array, is_causal: bool) -> int:
    """Floating point operations of a product with the scores, of the blocks that are computed."""
    b, heads, length, size = query.shape
    keys = key_.shape[2]
    block_q, block_k = _block(length), _block(keys)
    ends = range(block_q, length + 1, block_q)
    columns = [min(-(-(end - 1) // block_k) * block_k, keys) if is_causal else keys for end in ends]
    return 2 * b * heads * size * block_q * sum(columns)


def _scale(query: jax.Array, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)


def _repeated(x: jax.Array, heads: int) -> jax.Array:
    """Keys or values with a head for each of the queries'."""
    return x if x.shape[1] == heads else jnp.repeat(x, heads // x.shape[1], axis=1)


def _summed(grad: jax.Array, like: jax.Array) -> jax.Array:
    """The gradient of `_repeated`."""
    if grad.shape == like.shape:
        return grad
    b, heads, length, size = like.shape
    parts = grad.reshape(b, heads, -1, length, size).astype(np.float32)
    return parts.sum(axis=2).astype(like.dtype)


def forward(
    query: jax.Array,
    key_: jax.Array,
    value: jax.Array,
    attn_bias: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    key: None = None,
) -> tuple[Any, ...]:
    """As `tpu_core.lowering.attention.attention`, for what `FLASH` takes."""
    heads, keys = query.shape[1], key_.shape[2]
    with calling(query.dtype, 2 * _product(query, key_, is_causal)):
        out, total, top = kernels._flash_attention_impl(
            query,
            _repeated(key_, heads),
            _repeated(value, heads),
            None,  # bias
            None,  # segment ids
            True,  # with sums and maxima
            is_causal,
            _scale(query, scale),
            1,  # batch a block
            _block(query.shape[2]),
            _block(keys),
            _block(keys),
            False,  # debug
        )
    logsumexp = jnp.log(total) + top
    seed = jnp.zeros((), np.int64)
    return out, logsumexp, None, None, None, None, seed, seed, None


def backward(
    grad_out: jax.Array,
    query: jax.Array,
    key_: jax.Array,
    value: jax.Array,
    attn_bias: None,
    grad_input_mask: list[bool],
    output: jax.Array,
    logsumexp: jax.Array,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    is_causal: bool,
    philox_seed: jax.Array,
    philox_offset: jax.Array,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """As `tpu_core.lowering.attention.attention_backward`, for what `FLASH` takes."""
    heads = query.shape[1]
    block_q, block_k = _block(query.shape[2]), _block(key_.shape[2])
    product = _product(query, key_, is_causal)
    wide_out, wide_grad = output.astype(np.float32), grad_out.astype(np.float32)
    delta = (wide_out * wide_grad).sum(axis=-1)
    operands = (
        query,
        _repeated(key_, heads),
        _repeated(value, heads),
        None,  # bias
        None,  # segment ids
        # The kernels divide exponentials of the scores less their maximum by the sum. With the
        # logarithm of the sum in the maximum's place the sum is 1.
        jnp.ones_like(logsumexp),
        logsumexp,
        grad_out,
        delta,
    )
    options: dict[str, Any] = {
        "block_q_major": block_q,
        "block_k_major": block_k,
        "block_k": block_k,
        "sm_scale": _scale(query, scale),
        "causal": is_causal,
        "mask_value": kernels.DEFAULT_MASK_VALUE,
        "debug": False,
    }
    grads: list[Any] = [None, None, None, None]
    if grad_input_mask[0]:
        with calling(query.dtype, 3 * product):
            grads[0], _ = kernels._flash_attention_bwd_dq(*operands, **options)
    if grad_input_mask[1] or grad_input_mask[2]:
        with calling(query.dtype, 4 * product):
            grad_key, grad_value = kernels._flash_attention_bwd_dkv(
                *operands, block_q=block_q, **options
            )
        grads[1] = _summed(grad_key, key_) if grad_input_mask[1] else None
        grads[2] = _summed(grad_value, value) if grad_input_mask[2] else None
    return tuple(grads)


def _four_dims(a: AttentionArguments, target: Target) -> bool:
    shapes = (a.query, a.key, a.value)
    return all(len(s) == 4 and 0 not in s and s[0] == a.query[0] for s in shapes)


def _head_sizes(a: AttentionArguments, target: Target) -> bool:
    return a.query[3] in _HEAD_SIZES and a.query[3] == a.key[3] == a.value[3]


def _heads(a: AttentionArguments, target: Target) -> bool:
    return a.key[1] == a.value[1] and a.query[1] % a.key[1] == 0


def _lengths(a: AttentionArguments, target: Target) -> bool:
    smallest = _BLOCKS[-1]
    return a.query[2] % smallest == 0 and a.key[2] % smallest == 0 and a.key[2] == a.value[2]


FLASH = Implementation(
    "pallas",
    "The flash attention kernels of JAX: memory grows with the lengths, not with their product.",
    platforms=("tpu",),
    dtypes=("bfloat16", "float32"),
    rules=(
        Rule(
            "Query, key and value have the dimensions (batch, heads, length, head size), none of "
            "them 0, and the same batch.",
            _four_dims,
        ),
        Rule("The head size is 64 or 128, the same for query, key and value.", _head_sizes),
        Rule("The heads of the query are a multiple of those of key and value.", _heads),
        Rule("The lengths of query and key are multiples of 128.", _lengths),
        Rule("There is no mask but `is_causal`.", lambda a, target: not a.has_bias),
        Rule("There is no dropout.", lambda a, target: a.dropout == 0),
        Rule(
            "The scale is a number, not a tensor.",
            lambda a, target: a.scale is None or isinstance(a.scale, (int, float)),
        ),
        Rule(
            "The program is for one device: XLA divides no kernel among several.",
            lambda a, target: target.devices == 1,
        ),
        Rule(
            "The chip is none of TPU v2 and v3, whose matrix units Mosaic gives no bfloat16.",
            lambda a, target: target.kind not in ("TPU v2", "TPU v3"),
        ),
    ),
    functions=MappingProxyType({FORWARD: forward, BACKWARD: backward}),
)
