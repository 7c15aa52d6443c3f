"""Attention by flash attention kernels: scores stay in the chip's own memory.

What passes between forward and backward is the logarithm of the sum of exponentials, as in the
plain lowering: either can follow on the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from tpu_core.array_types import Float, Float32, Shaped, UInt32
from tpu_core.extend import Target, find_lowering, load_lowerings
from tpu_kernels.ops.attention import lengths, sharded
from tpu_kernels.ops.attention.arguments import AttentionArguments
from tpu_kernels.ops.attention.dropout import Dropout
from tpu_kernels.ops.attention.lengths import scores
from tpu_kernels.ops.attention.overloads import (
    BACKWARD,
    FORWARD,
    KERNEL_FORWARD,
    KERNEL_OF_BIAS,
    KERNEL_OF_KEYS,
    KERNEL_OF_QUERY,
)
from tpu_kernels.ops.registry import Implementation, Rule
from tpu_kernels.ops.rules import HAS_BFLOAT16

_LARGEST_HEAD = 512
# Among the arguments of the backward pass that follow on the sums.
_DROPOUT, _IS_CAUSAL, _SEED, _OFFSET = 4, 5, 6, 7


def _dropout(rate: float, query: Float[Array, "batch heads queries head_size"]) -> Dropout | None:
    return Dropout(rate, query.shape[1]) if rate > 0 else None


def _backward(
    *operands: Any,
    seed: UInt32[Array, " 2"] | None,
    wanted: tuple[bool, bool, bool],
    **options: Any,
) -> list[Any]:
    """The gradients of query, of keys and values, and of the bias, as far as they are asked for."""
    made: list[Any] = []
    if wanted[0]:
        made.append(lengths.of_query(operands, seed, scores(KERNEL_OF_QUERY, operands, **options)))
    if wanted[1]:
        of = scores(KERNEL_OF_KEYS, operands, **options)
        made += lengths.of_key_and_value(operands, seed, of)
    if wanted[2]:
        made.append(lengths.of_bias(operands, seed, scores(KERNEL_OF_BIAS, operands, **options)))
    return made


def _plain(op: str) -> Callable[..., tuple[Any, ...]]:
    """The lowering in whose place the kernel stands."""
    load_lowerings()
    entry = find_lowering(op)
    assert entry is not None  # one of ATen's
    return entry.fn


def forward(
    query: Float[Array, "batch heads queries head_size"],
    key_: Float[Array, "batch key_heads keys head_size"],
    value: Float[Array, "batch key_heads keys value_size"],
    attn_bias: Shaped[Array, " ..."] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    key: UInt32[Array, " 2"] | None = None,
) -> tuple[Any, ...]:
    """As the lowering of `FORWARD`, for what `FLASH` takes."""
    operands = (query, key_, value, attn_bias)
    if sharded.is_probing():
        stand_in = sharded.probe(operands)
        return _plain(FORWARD)(*stand_in, dropout_p, is_causal, scale=scale, key=key)
    dropout = _dropout(dropout_p, query)
    options: Any = {"is_causal": is_causal, "scale": scale, "dropout": dropout}

    def made(*parts: Any) -> Any:
        of = scores(KERNEL_FORWARD, parts, **options)
        return lengths.forward(parts, None if dropout is None else key, of)

    out, logsumexp = sharded.on_parts(made, operands, (4, 3))
    seed = jnp.zeros((2,), np.int64) if key is None else key.astype(np.int64)
    return out, logsumexp, None, None, None, None, seed[0], seed[1], None


def backward(
    grad_out: Float[Array, "batch heads queries value_size"],
    query: Float[Array, "batch heads queries head_size"],
    key_: Float[Array, "batch key_heads keys head_size"],
    value: Float[Array, "batch key_heads keys value_size"],
    attn_bias: Shaped[Array, " ..."] | None,
    grad_input_mask: list[bool],
    output: Float[Array, "batch heads queries value_size"],
    logsumexp: Float32[Array, "batch heads queries"],
    *rest: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """As the lowering of `BACKWARD`, for what `FLASH` takes."""
    operands = (query, key_, value, attn_bias, grad_out, output, logsumexp)
    if sharded.is_probing():
        q, k, v, bias, grad, out, sums = sharded.probe(operands)
        return _plain(BACKWARD)(grad, q, k, v, bias, grad_input_mask, out, sums, *rest, scale=scale)
    dropout = _dropout(rest[_DROPOUT], query)
    seed = None
    if dropout is not None:
        seed = jnp.stack([rest[_SEED], rest[_OFFSET]]).astype(np.uint32)
    added = attn_bias is not None and attn_bias.dtype != np.bool_
    of_query, of_keys = grad_input_mask[0], grad_input_mask[1] or grad_input_mask[2]
    of_bias = added and bool(grad_input_mask[3])
    function = functools.partial(
        _backward,
        seed=seed,
        wanted=(of_query, of_keys, of_bias),
        is_causal=rest[_IS_CAUSAL],
        scale=scale,
        dropout=dropout,
    )
    ranks = (4,) * (of_query + 2 * of_keys + of_bias)
    made = iter(sharded.on_parts(function, operands, ranks))
    computed = of_query, of_keys, of_keys, of_bias
    # What is not asked for has a place among the results, too.
    grads = [
        next(made) if known else jnp.zeros_like(x)
        for known, x in zip(computed, (query, key_, value, attn_bias if added else None))
        if x is not None
    ]
    return tuple(grads) if added else (*grads, None)


def _four_dims(a: AttentionArguments, target: Target) -> bool:
    shapes = (a.query, a.key, a.value)
    return all(len(s) == 4 and 0 not in s and s[0] == a.query[0] for s in shapes)


def _head_sizes(a: AttentionArguments, target: Target) -> bool:
    return a.query[3] == a.key[3] and max(a.query[3], a.value[3]) <= _LARGEST_HEAD


def _heads(a: AttentionArguments, target: Target) -> bool:
    return a.key[1] == a.value[1] and a.query[1] % a.key[1] == 0


def _bias_rows(a: AttentionArguments, target: Target) -> bool:
    lengths = a.query[2], a.key[2]
    return not a.bias_gradient or (a.bias is not None and a.bias[-2:] == lengths)


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
            "A mask whose gradient is asked for has a row for each query and a column for each "
            "key.",
            _bias_rows,
        ),
        Rule(
            "With dropout, or a mask whose gradient is asked for, the program is for one device.",
            lambda a, target: target.devices == 1 or not (a.dropout or a.bias_gradient),
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
