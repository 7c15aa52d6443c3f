"""Scaled dot product attention as one op, and its exact gradient.

Scores, softmax and all sums are float32 for 16-bit inputs; the probabilities are rounded to the
inputs' dtype for the product with the values, as flash attention does. ``is_causal`` aligns the
mask at the top left. Fewer key heads than query heads share keys in order (grouped queries).
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpu_core.array_types import Bool, Float, Int, Shaped, UInt32
from tpu_core.dtypes import cast
from tpu_core.lowering.matmul import contract
from tpu_core.lowering.random import random_words
from tpu_core.lowering.registry import lowering

_QUERY_KEY = (((3,), (3,)), ((0, 1), (0, 1)))  # [B,H,L,E] x [B,H,S,E] -> [B,H,L,S]
_SCORE_VALUE = (((3,), (2,)), ((0, 1), (0, 1)))  # [B,H,L,S] x [B,H,S,E] -> [B,H,L,E]
_SCORE_QUERY = (((2,), (2,)), ((0, 1), (0, 1)))  # [B,H,L,S] x [B,H,L,E] -> [B,H,S,E]


def _four_dims(
    x: Float[Array, "*batch heads length size"],
) -> Float[Array, "batch heads length size"]:
    return x[None] if x.ndim == 3 else x


def _fold(x: Float[Array, "batch _ _ size"], heads: int) -> Float[Array, "batch {heads} _ size"]:
    """``[B, H, L, X]`` with one key head's queries side by side: ``[B, heads, H/heads*L, X]``."""
    return x if x.shape[1] == heads else x.reshape(x.shape[0], heads, -1, x.shape[3])


def _scores(
    q: Float[Array, "batch heads queries head_size"],
    k: Float[Array, "batch key_heads keys head_size"],
    bias: Shaped[Array, " ..."] | None,
    is_causal: bool,
    scale: Any,
) -> Float[Array, "batch heads queries keys"]:
    b, h, length, _ = q.shape
    s = contract(_fold(q, k.shape[1]), k, _QUERY_KEY).reshape(b, h, length, k.shape[2])
    s = s * _scale(q, scale, s.dtype)
    low = jnp.asarray(-np.inf, s.dtype)
    if bias is not None:
        s = jnp.where(bias, s, low) if bias.dtype == np.bool_ else s + cast(bias, s.dtype)
    if is_causal:
        rows = lax.broadcasted_iota(np.int32, s.shape[2:], 0)
        columns = lax.broadcasted_iota(np.int32, s.shape[2:], 1)
        s = jnp.where(rows >= columns, s, low)
    return s


def _softmax(
    s: Float[Array, "batch heads queries keys"],
) -> tuple[Float[Array, "batch heads queries keys"], Float[Array, "batch heads queries"]]:
    top = _finite(jnp.max(s, axis=-1, keepdims=True, initial=-np.inf))
    e = jnp.exp(s - top)
    total = jnp.sum(e, axis=-1, keepdims=True)
    p = e * lax.reciprocal(jnp.where(total == 0, jnp.ones((), s.dtype), total))
    return p, lax.squeeze(jnp.log(total) + top, (top.ndim - 1,))


def _scale(q: Array, scale: Any, dtype: Any) -> Array:
    return cast(1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale, dtype)


def _keep(
    key: UInt32[Array, " 2"], dropout_p: float, shape: tuple[int, ...]
) -> Bool[Array, " ..."]:
    """Mask of the probabilities that dropout keeps; forward and backward derive it from the same
    key. Its bits are those of ``jax.random.bits``.
    """
    threshold = np.uint32(min(int(dropout_p * 2**32), 2**32 - 1))
    high, low = random_words(key, shape)
    return (high ^ low) >= threshold


def _drop(
    p: Float[Array, "batch heads queries keys"],
    keep: Bool[Array, "batch heads queries keys"],
    dropout_p: float,
) -> Float[Array, "batch heads queries keys"]:
    factor = 0.0 if dropout_p >= 1 else 1.0 / (1.0 - dropout_p)
    return jnp.where(keep, p * jnp.asarray(factor, p.dtype), jnp.zeros((), p.dtype))


def _finite(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Zero for minus infinity, so that a fully masked row has probability 0 and not NaN."""
    return jnp.where(x == -np.inf, jnp.zeros((), x.dtype), x)


@lowering(
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    static=("dropout_p", "scale"),
    random="dropout_p",
)
def attention(
    query: Float[Array, "*batch heads queries head_size"],
    key_: Float[Array, "*batch key_heads keys head_size"],
    value: Float[Array, "*batch key_heads keys value_size"],
    attn_bias: Shaped[Array, " ..."] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: Any = None,
    key: UInt32[Array, " 2"] | None = None,
) -> tuple[Any, ...]:
    """The key of the dropout travels to the backward pass as ``philox_seed, philox_offset``.

    ``max_q`` and ``max_k`` are None: numbers are the meta function's to give.
    """
    q, k, v = _four_dims(query), _four_dims(key_), _four_dims(value)
    s = _scores(q, k, attn_bias, is_causal, scale)
    p, logsumexp = _softmax(s)
    if dropout_p > 0:
        p = _drop(p, _keep(key, dropout_p, p.shape), dropout_p)
    out = contract(_fold(cast(p, v.dtype), k.shape[1]), v, _SCORE_VALUE)
    out = out.reshape(*query.shape[:-1], v.shape[-1])
    seed = jnp.zeros((2,), np.int64) if key is None else cast(key, np.int64)
    return out, logsumexp, None, None, None, None, seed[0], seed[1], None


@lowering(
    "aten._scaled_dot_product_fused_attention_overrideable_backward.default",
    static=("dropout_p", "scale"),
)
def attention_backward(
    grad_out: Float[Array, "*batch heads queries value_size"],
    query: Float[Array, "*batch heads queries head_size"],
    key_: Float[Array, "*batch key_heads keys head_size"],
    value: Float[Array, "*batch key_heads keys value_size"],
    attn_bias: Shaped[Array, " ..."] | None,
    grad_input_mask: list[bool],
    output: Float[Array, "*batch heads queries value_size"],
    logsumexp: Float[Array, "_ heads queries"],
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Int[Array, ""],
    philox_offset: Int[Array, ""],
    *,
    scale: Any = None,
) -> tuple[Any, ...]:
    """Gradient of `attention` from its output and logsumexp (FlashAttention, algorithm 4)."""
    q, k, v, y, dy = (_four_dims(x) for x in (query, key_, value, output, grad_out))
    heads = k.shape[1]
    s = _scores(q, k, attn_bias, is_causal, scale)
    p, own = _softmax(s)
    # The keys may be some of those that the output was computed from, as in ring attention. Else
    # the factor is 1, and the forward pass's probabilities serve.
    share = jnp.exp(_finite(cast(own, logsumexp.dtype)) - _finite(logsumexp))
    dy = dy * cast(share, dy.dtype)[..., None]
    dp = contract(_fold(dy, heads), v, _QUERY_KEY).reshape(p.shape)
    dropped = p
    if dropout_p > 0:
        key = cast(jnp.stack([philox_seed, philox_offset]), np.uint32)
        keep = _keep(key, dropout_p, p.shape)
        dropped, dp = _drop(p, keep, dropout_p), _drop(dp, keep, dropout_p)
    # rowsum(dP * P) equals rowsum(dO * O), which is a dim shorter.
    delta = jnp.sum(cast(dy, s.dtype) * cast(y, s.dtype), axis=-1, keepdims=True)
    ds = p * (dp - delta)
    # What is not asked for has a place among the results, too.
    grads: list[Any] = [*(jnp.zeros_like(x) for x in (query, key_, value)), None]
    factor = _scale(q, scale, s.dtype)
    small = _fold(cast(ds, q.dtype), heads)
    if grad_input_mask[0]:
        grads[0] = (contract(small, k, _SCORE_VALUE) * factor).reshape(query.shape)
    if grad_input_mask[1]:
        grad_k = contract(small, _fold(q, heads), _SCORE_QUERY) * factor
        grads[1] = grad_k.reshape(key_.shape)
    if grad_input_mask[2]:
        small_p = _fold(cast(dropped, dy.dtype), heads)
        grads[2] = contract(small_p, _fold(dy, heads), _SCORE_QUERY).reshape(value.shape)
    if attn_bias is not None and attn_bias.dtype != np.bool_:
        grads[3] = _sum_to(ds, attn_bias.shape) if grad_input_mask[3] else jnp.zeros_like(attn_bias)
    return tuple(grads)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the dims along which ``shape`` was broadcast to ``x``."""
    full = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(i for i, (n, m) in enumerate(zip(x.shape, full)) if m == 1 and n != 1)
    return jnp.sum(x, axis=axes, keepdims=True).reshape(shape)
