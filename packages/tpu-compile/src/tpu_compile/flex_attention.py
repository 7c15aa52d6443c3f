"""``flex_attention``: attention whose scores are changed by a graph over one score and its indices.

The graphs are evaluated for all scores at once by `jax.vmap`. Scores are computed as PyTorch's
eager does, in full; masked blocks are not left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from torch.fx import GraphModule

from tpu_core.lowering.dtypes import cast
from tpu_core.lowering.matmul import contract
from tpu_core.lowering.registry import lowering

if TYPE_CHECKING:
    from tpu_compile.control_flow import Call

_QUERY_KEY = (((3,), (3,)), ((0, 1), (0, 1)))  # [B,H,M,E] x [B,H,N,E] -> [B,H,M,N]
_SCORE_VALUE = (((3,), (2,)), ((0, 1), (0, 1)))  # [B,H,M,N] x [B,H,N,E] -> [B,H,M,E]
_SCORE_QUERY = (((2,), (2,)), ((0, 1), (0, 1)))  # [B,H,M,N] x [B,H,M,E] -> [B,H,N,E]
_LOG_2 = math.log(2)  # PyTorch's statistics are logarithms to base 2


def flex_attention(
    call: Call,
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
        block_mask: Last in it, the graph of four indices and ``mask_buffers`` that is the mask.
        scale: Factor of the scores before ``score_mod``.
    """
    key, value = _repeat(query, key), _repeat(query, value)
    _, scores = _scores(
        call, query, key, score_mod, block_mask[-1], scale, score_buffers, mask_buffers
    )
    highest = jnp.max(scores, -1)
    nothing = highest == -np.inf
    weights = jnp.exp(scores - jnp.where(nothing, 0, highest)[..., None])
    total = jnp.sum(weights, -1)
    log_total = jnp.where(nothing, -np.inf, jnp.log(total) + highest)
    weights = jnp.where(nothing[..., None], 0, weights / total[..., None])
    out = contract(cast(weights, value.dtype), value, _SCORE_VALUE)
    log_total, highest = (cast(s / _LOG_2, np.float32) for s in (log_total, highest))
    return cast(out, query.dtype), log_total, highest


def flex_attention_backward(
    call: Call,
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
    shape = key.shape
    all_keys, all_values = _repeat(query, key), _repeat(query, value)
    raw, scores = _scores(
        call, query, all_keys, score_mod, block_mask[-1], scale, score_buffers, mask_buffers
    )
    wide = scores.dtype
    log_total = cast(log_total, wide)[..., None] * _LOG_2
    weights = jnp.where(log_total == -np.inf, 0, jnp.exp(scores - log_total))
    grad_out = jnp.zeros_like(out) if grad_out is None else grad_out
    grad_value = contract(cast(weights, query.dtype), grad_out, _SCORE_QUERY)
    grad_weights = contract(grad_out, all_values, _QUERY_KEY)
    change = grad_weights - jnp.sum(cast(out, wide) * cast(grad_out, wide), -1, keepdims=True)
    if grad_log_total is not None:
        change = change + cast(grad_log_total, wide)[..., None] / _LOG_2
    grads, captured = _of_each(
        lambda s, b, h, m, n, g: _joint(call, joint, (s, b, h, m, n, g, *score_buffers)),
        raw.shape,
        raw,
        weights * change,
        out_axes=(0, None),
    )
    grads = jnp.where(_mask(call, block_mask[-1], mask_buffers, raw.shape), grads * scale, 0)
    grads = cast(grads, query.dtype)
    return (
        cast(contract(grads, all_keys, _SCORE_VALUE), query.dtype),
        _reduce(contract(grads, query, _SCORE_QUERY), shape, key.dtype),
        _reduce(grad_value, value.shape, value.dtype),
        captured,
    )


def _repeat(query: jax.Array, x: jax.Array) -> jax.Array:
    """Keys or values, one for each of the query's heads and sequences."""
    x = jnp.repeat(x, query.shape[1] // x.shape[1], axis=1)
    return jnp.broadcast_to(x, (query.shape[0], *x.shape[1:]))


def _reduce(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The sum over what `_repeat` repeated."""
    x = x.reshape(x.shape[0], shape[1], -1, *x.shape[2:]).sum(2)
    return cast(x if shape[0] == x.shape[0] else x.sum(0, keepdims=True), dtype)


def _scores(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    score_mod: GraphModule,
    mask_mod: GraphModule,
    scale: float,
    score_buffers: Sequence[Any],
    mask_buffers: Sequence[Any],
) -> tuple[jax.Array, jax.Array]:
    """Scores before and after ``score_mod`` and the mask, in float32 or float64."""
    raw = contract(query, key, _QUERY_KEY) * scale

    def change(score: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return call.run(score_mod, (score, b, h, m, n, *score_buffers), None)[0]

    changed = cast(_of_each(change, raw.shape, raw), raw.dtype)
    mask = _mask(call, mask_mod, mask_buffers, raw.shape)
    return raw, jnp.where(mask, changed, -np.inf)


def _mask(
    call: Call, mask_mod: GraphModule, buffers: Sequence[Any], shape: tuple[int, ...]
) -> jax.Array:
    mask: jax.Array = _of_each(lambda *at: call.run(mask_mod, (*at, *buffers), None)[0], shape)
    return mask


def _of_each(
    f: Callable[..., Any], shape: tuple[int, ...], *arrays: jax.Array, out_axes: Any = 0
) -> Any:
    """A function of one element of each array and its indices, for all of them.

    Args:
        f: Called with the first array's element, four indices, and the others' elements.
        shape: ``[B, H, M, N]``.
        arrays: Of that shape.
        out_axes: As of `jax.vmap`.
    """
    count = len(arrays[:1])
    for dim in reversed(range(4)):
        indices = [0 if d == dim else None for d in range(4)]
        f = jax.vmap(f, (*[0] * count, *indices, *[0] * (len(arrays) - count)), out_axes)
    return f(*arrays[:1], *(np.arange(n, dtype=np.int32) for n in shape), *arrays[1:])


def _joint(call: Call, joint: GraphModule, arguments: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    grad, _, _, _, _, *captured = call.run(joint, arguments, None)
    return grad, tuple(None if g is None else _total(g) for g in captured)


@custom_vmap
def _total(x: jax.Array) -> jax.Array:
    """One element's share of a gradient; the sum of all where it is mapped."""
    return x


@_total.def_vmap
def _total_of_many(_size: int, _mapped: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    return _total(x.sum(0)), False


@lowering("flex_lib.zeros_and_scatter.default")
def zeros_and_scatter(
    shape: Sequence[int], indices: Sequence[jax.Array], values: jax.Array
) -> jax.Array:
    """The gradient of a buffer that is read at some indices.

    Mapped over scores, it is one scatter of all their shares, not a buffer for each.
    """

    @custom_vmap
    def scatter(values: jax.Array, *indices: jax.Array) -> jax.Array:
        return jnp.zeros(tuple(shape), values.dtype).at[indices].add(values)

    @scatter.def_vmap
    def scatter_many(size: int, mapped: Any, *operands: jax.Array) -> tuple[jax.Array, bool]:
        expanded = (
            x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_mapped in zip(operands, mapped)
        )
        return scatter(*expanded), False

    result: jax.Array = scatter(values, *indices)
    return result
