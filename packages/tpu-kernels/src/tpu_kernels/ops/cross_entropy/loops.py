"""The loss by a loop of XLA's over the vocabulary: some columns of the logits at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from tpu_core.array_types import Float, Int

# Columns at a time. Each round reads and writes the sums of all tokens: fewer rounds move less.
_CHUNK = 4096
_ROWS_BY_ROWS = (((1,), (1,)), ((), ()))  # [T, F] x [V, F] -> [T, V]
_COLUMNS_BY_ROWS = (((0,), (0,)), ((), ()))  # [T, V] x [T, F] -> [V, F]


def wide(x: Array) -> Any:
    """The dtype of sums: float32, or float64."""
    return jnp.promote_types(x.dtype, jnp.float32)


def capped(
    logits: Float[Array, "*shape"], softcap: float
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"] | None]:
    """Logits with the cap, and its slope, None without a cap."""
    if not softcap:
        return logits, None
    bounded = jnp.tanh(logits / softcap)
    return softcap * bounded, 1 - bounded * bounded


def sloped(
    x: Float[Array, "*shape"], slope: Float[Array, "*shape"] | None
) -> Float[Array, "*shape"]:
    """``x`` times the slope of the cap."""
    return x if slope is None else x * slope


def of_target(
    picked: Float[Array, " tokens"],
    weight: Float[Array, "vocabulary features"],
    target: Int[Array, " tokens"],
    softcap: float,
) -> Float[Array, "tokens features"]:
    """Gradient of the targets' logits, of which ``picked`` are the values, by the hidden states."""
    rows = weight[target].astype(picked.dtype)
    return rows * (1 - (picked / softcap) ** 2)[:, None] if softcap else rows


def _logits(
    hidden: Float[Array, "tokens features"],
    weight: Float[Array, "columns features"],
    bias: Float[Array, " columns"] | None,
    softcap: float,
) -> tuple[Float[Array, "tokens columns"], Float[Array, "tokens columns"] | None]:
    logits = lax.dot_general(hidden, weight, _ROWS_BY_ROWS, preferred_element_type=wide(hidden))
    return capped(logits if bias is None else logits + bias.astype(logits.dtype), softcap)


def _over_chunks(
    step: Callable[..., Any],
    start: Any,
    weight: Float[Array, "vocabulary features"],
    bias: Float[Array, " vocabulary"] | None,
    chunk: int,
) -> Any:
    """Fold ``step(carry, place, new, weights, biases)`` over the chunks of a vocabulary.

    ``place`` is where a chunk begins, and ``new`` the first column that no chunk before it had: the
    last chunk begins early where the vocabulary does not divide evenly.
    """
    size = weight.shape[0]

    def round_(i: Any, carry: Any) -> Any:
        new = i * chunk
        place = jnp.minimum(new, size - chunk)
        weights = lax.dynamic_slice_in_dim(weight, place, chunk)
        biases = None if bias is None else lax.dynamic_slice_in_dim(bias, place, chunk)
        return step(carry, place, new, weights, biases)

    rounds = -(-size // chunk)
    return round_(0, start) if rounds == 1 else lax.fori_loop(0, rounds, round_, start)


def forward(
    hidden: Float[Array, "tokens features"],
    weight: Float[Array, "vocabulary features"],
    target: Int[Array, " tokens"],
    bias: Float[Array, " vocabulary"] | None,
    smoothing: float,
    softcap: float,
    chunk: int,
    slopes: bool,
) -> tuple[Float[Array, " tokens"], Float[Array, " tokens"], Float[Array, "_ features"]]:
    """Losses, logarithms of the sums of exponentials, and gradients by the hidden states.

    Args:
        hidden: Hidden states.
        weight: Of the layer that gives the logits.
        target: Labels, below the vocabulary.
        bias: Of the layer.
        smoothing: Of the labels.
        softcap: Of the logits, 0 for none.
        chunk: Columns at a time, 0 for what is thought best.
        slopes: Whether the gradients are wanted.

    Returns:
        Losses and logarithms in float32 or float64; of each token's loss the gradient by its row of
        ``hidden``, of the dtype of that, without rows if not wanted.
    """
    size, tokens = weight.shape[0], hidden.shape[0]
    chunk = min(chunk or _CHUNK, size)
    product = functools.partial(lax.dot, preferred_element_type=wide(hidden))

    def step(carry: Any, place: Any, new: Any, weights: Any, biases: Any) -> Any:
        top, total, picked, summed, expected, mean = carry
        logits, slope = _logits(hidden, weights, biases, softcap)
        columns = place + jnp.arange(chunk)
        is_new = columns >= new
        above = jnp.maximum(top, jnp.where(is_new, logits, -jnp.inf).max(1))
        # Of columns that are all -inf the exponentials are 0; those of -inf less -inf are NaN.
        base = jnp.where(above == -jnp.inf, 0, above)
        shares = jnp.where(is_new, jnp.exp(logits - base[:, None]), 0)
        rest = jnp.exp(top - base)
        total = total * rest + shares.sum(1)
        picked = picked + jnp.where(is_new & (columns == target[:, None]), logits, 0).sum(1)
        if smoothing:
            summed = summed + jnp.where(is_new, logits, 0).sum(1)
        if slopes:
            moved = product(sloped(shares, slope).astype(weights.dtype), weights)
            expected = expected * rest[:, None] + moved
        if slopes and smoothing:
            equal = sloped(jnp.where(is_new, jnp.ones_like(logits) / size, 0), slope)
            mean = mean + product(equal.astype(weights.dtype), weights)
        return above, total, picked, summed, expected, mean

    zero = jnp.zeros(tokens, wide(hidden))
    none = jnp.zeros((tokens if slopes else 0, hidden.shape[1]), wide(hidden))
    start = (jnp.full_like(zero, -jnp.inf), zero, zero, zero, none, none if smoothing else 0.0)
    carry = _over_chunks(step, start, weight, bias, chunk)
    top, total, picked, summed, expected, mean = carry
    logsumexp = top + jnp.log(total)
    # The difference first: beside a large maximum the logarithm, or a small loss, is rounded away.
    losses = (1 - smoothing) * (top - picked) + jnp.log(total)
    if smoothing:  # 0 times an infinite mean is NaN
        losses = losses + smoothing * (top - summed / size)
    if slopes:
        own = of_target(picked, weight, target, softcap)
        expected = expected / total[:, None] - (1 - smoothing) * own - smoothing * mean
    return losses, logsumexp, expected.astype(hidden.dtype)


def backward(
    grad: Float[Array, " tokens"],
    logsumexp: Float[Array, " tokens"],
    hidden: Float[Array, "tokens features"],
    weight: Float[Array, "vocabulary features"],
    target: Int[Array, " tokens"],
    bias: Float[Array, " vocabulary"] | None,
    smoothing: float,
    softcap: float,
    chunk: int,
) -> tuple[Float[Array, "vocabulary features"], Float[Array, " _"]]:
    """The gradients of weight and bias.

    Args:
        grad: Of the losses.
        logsumexp: As `forward` gives it.
        hidden, weight, target, bias, smoothing, softcap, chunk: As of `forward`.

    Returns:
        Of the dtypes of weight and bias; the second without elements if there is no bias.
    """
    size = weight.shape[0]
    chunk = min(chunk or _CHUNK, size)

    def step(carry: Any, place: Any, new: Any, weights: Any, biases: Any) -> Any:
        of_weight, of_bias = carry
        logits, slope = _logits(hidden, weights, biases, softcap)
        shares = jnp.exp(logits - logsumexp[:, None])
        shares = shares - (1 - smoothing) * (place + jnp.arange(chunk) == target[:, None])
        shares = sloped((shares - smoothing / size) * grad[:, None], slope)
        made = lax.dot_general(
            shares.astype(hidden.dtype),
            hidden,
            _COLUMNS_BY_ROWS,
            preferred_element_type=wide(hidden),
        )
        # What the last chunk has again of the one before is the same again.
        of_weight = lax.dynamic_update_slice(of_weight, made.astype(weight.dtype), (place, 0))
        if bias is not None:
            part = shares.sum(0).astype(bias.dtype)
            of_bias = lax.dynamic_update_slice(of_bias, part, (place,))
        return of_weight, of_bias

    none = jnp.zeros(0, weight.dtype) if bias is None else jnp.zeros_like(bias)
    made: tuple[Array, Array] = _over_chunks(
        step, (jnp.zeros_like(weight), none), weight, bias, chunk
    )
    return made
