"""``flex_attention``: attention whose scores are changed by a graph over one score and its indices.

Where a block mask names blocks, theirs alone are computed (`tpu_compile.flex_blocks`); else all
scores are, at once, as PyTorch's eager does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from torch.fx import GraphModule

from tpu_compile import flex_blocks
from tpu_compile.flex_blocks import QUERY_KEY, SCORE_QUERY, SCORE_VALUE, blocks_of
from tpu_compile.flex_scores import Indices, ScoreGraphs, all_indices
from tpu_core.extend import cast, contract

if TYPE_CHECKING:
    from tpu_compile.control_flow import HigherOrderCall

_LOG_2 = math.log(2)  # PyTorch's statistics are logarithms to base 2


def flex_attention(
    call: HigherOrderCall,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    score_mod: GraphModule,
    block_mask: Sequence[Any],
    scale: float,
    _options: dict[str, Any],
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention, and of each query's scores the logarithm of the sum and the maximum.

    Args:
        call: The call.
        query: ``[B, Hq, M, E]``.
        key, value: ``[B or 1, Hkv, N, E]``, where ``Hkv`` divides ``Hq``.
        score_mod: Graph of a score, its four indices and ``score_buffers``.
        block_mask: ``BlockMask.as_tuple()``; last in it, the graph of four indices and
            ``mask_buffers`` that is the mask.
        scale: Factor of the scores before ``score_mod``.
    """
    graphs = ScoreGraphs(call, score_mod, block_mask[-1], score_buffers, mask_buffers)
    inputs = query, _repeat(query, key), _repeat(query, value)
    blocks = blocks_of(block_mask, (*query.shape[:3], key.shape[2]))
    if blocks is None:
        out, log_total, highest = _all(graphs, *inputs, scale)
    else:
        out, log_total, highest = flex_blocks.forward(graphs, blocks, *inputs, scale)
    log_total, highest = (cast(s / _LOG_2, np.float32) for s in (log_total, highest))
    return cast(out, query.dtype), log_total, highest


def _all(
    graphs: ScoreGraphs, query: jax.Array, key: jax.Array, value: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As of `tpu_compile.flex_blocks.forward`."""
    _, scores, _, _ = _scores(graphs, query, key, scale)
    highest = jnp.max(scores, -1)
    nothing = highest == -np.inf
    weights = jnp.exp(scores - jnp.where(nothing, 0, highest)[..., None])
    total = jnp.sum(weights, -1)
    log_total = jnp.where(nothing, -np.inf, jnp.log(total) + highest)
    weights = jnp.where(nothing[..., None], 0, weights / total[..., None])
    return contract(cast(weights, value.dtype), value, SCORE_VALUE), log_total, highest


def flex_attention_backward(
    call: HigherOrderCall,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    log_total: jax.Array,
    grad_out: jax.Array | None,
    grad_log_total: jax.Array | None,
    score_mod: GraphModule,
    joint: GraphModule,
    block_mask: Sequence[Any],
    scale: float,
    _options: dict[str, Any],
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array | None, ...]]:
    """Gradients of query, key, value and the buffers that ``score_mod`` reads.

    Args:
        joint: Graph of ``score_mod``'s inputs, the score's gradient before the buffers; it returns
            their gradients.
    """
    graphs = ScoreGraphs(call, score_mod, block_mask[-1], score_buffers, mask_buffers, joint)
    inputs = query, _repeat(query, key), _repeat(query, value)
    wide = jnp.promote_types(query.dtype, np.float32)
    grad_out = jnp.zeros_like(out) if grad_out is None else grad_out
    delta = jnp.sum(cast(out, wide) * cast(grad_out, wide), -1)
    if grad_log_total is not None:
        delta = delta - cast(grad_log_total, wide) / _LOG_2
    given = *inputs, grad_out, cast(log_total, wide) * _LOG_2, delta, scale
    blocks = blocks_of(block_mask, (*query.shape[:3], key.shape[2]))
    if blocks is None:
        grad_query, grad_key, grad_value, captured = _all_backward(graphs, *given)
    else:
        made = flex_blocks.backward(graphs, blocks, *given)
        grad_query, grad_key, grad_value, captured = made
    return (
        cast(grad_query, query.dtype),
        _reduce(grad_key, key.shape, key.dtype),
        _reduce(grad_value, value.shape, value.dtype),
        captured,
    )


def _all_backward(
    graphs: ScoreGraphs,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    grad_out: jax.Array,
    log_total: jax.Array,
    delta: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array | None, ...]]:
    """As of `tpu_compile.flex_blocks.backward`."""
    raw, scores, mask, at = _scores(graphs, query, key, scale)
    log_total = log_total[..., None]
    weights = jnp.where(log_total == -np.inf, 0, jnp.exp(scores - log_total))
    change = weights * (contract(grad_out, value, QUERY_KEY) - delta[..., None])
    grads, captured = graphs.gradients(raw, at, change)
    grads = cast(jnp.where(mask, grads * scale, 0), query.dtype)
    return (
        contract(grads, key, SCORE_VALUE),
        contract(grads, query, SCORE_QUERY),
        contract(cast(weights, query.dtype), grad_out, SCORE_QUERY),
        captured,
    )


def _scores(
    graphs: ScoreGraphs, query: jax.Array, key: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array, Indices]:
    """Scores before ``score_mod`` and after the mask, the mask, and the indices."""
    raw = contract(query, key, QUERY_KEY) * scale
    at = all_indices(raw.shape)
    mask = graphs.mask(at)
    return raw, jnp.where(mask, graphs.changed(raw, at), -np.inf), mask, at


def _repeat(query: jax.Array, x: jax.Array) -> jax.Array:
    """Keys or values, one for each of the query's heads and sequences."""
    x = jnp.repeat(x, query.shape[1] // x.shape[1], axis=1)
    return jnp.broadcast_to(x, (query.shape[0], *x.shape[1:]))


def _reduce(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The sum over what `_repeat` repeated."""
    x = x.reshape(x.shape[0], shape[1], -1, *x.shape[2:]).sum(2)
    return cast(x if shape[0] == x.shape[0] else x.sum(0, keepdims=True), dtype)
