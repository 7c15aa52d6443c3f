"""The loss of a language model without its logits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax import lax

from tpu_kernels.decorator import jax_op

# Columns of logits at a time: wide enough for a matrix unit, few enough to stay near it.
_CHUNK = 2048


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    chunk: int | None = None,
    plain: bool = False,
) -> torch.Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), target)`` without building the logits.

    The vocabulary is gone through in chunks, forward and backward, so that memory grows with
    ``tokens * chunk`` and not with ``tokens * vocabulary``. Sums are in float32, or in float64.

    Args:
        hidden: ``(..., features)``.
        weight: ``(vocabulary, features)``.
        target: ``(...)``, integers below the vocabulary, or ``ignore_index``.
        bias: ``(vocabulary,)`` or None.
        ignore_index: Targets that count for nothing.
        reduction: ``"mean"`` (over the targets that count), ``"sum"`` or ``"none"``.
        label_smoothing: As of `torch.nn.functional.cross_entropy`.
        softcap: Logits are ``softcap * tanh(logits / softcap)`` unless it is 0.
        chunk: Columns of logits at a time; the vocabulary or 2,048 unless given.
        plain: Build the logits, as PyTorch does; also what is done with tensors on other devices.

    Returns:
        A number, or losses of the shape of ``target`` for ``"none"``, in the dtype of ``hidden``.

    Raises:
        ValueError: An argument has a wrong shape or value.

    Example:
        >>> loss = tpu_kernels.linear_cross_entropy(model.trunk(ids), model.head.weight, labels)
    """
    _check(hidden, weight, target, bias, reduction)
    if plain or hidden.device.type != "tpu":
        logits = F.linear(hidden, weight, bias)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(
            logits.flatten(0, -2),
            target.flatten(),
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        ).reshape(target.shape if reduction == "none" else ())
    counts = target != ignore_index
    losses = _op(
        hidden.reshape(-1, hidden.size(-1)),
        weight,
        torch.where(counts, target, 0).reshape(-1).to(torch.int32),
        bias,
        float(label_smoothing),
        float(softcap),
        min(chunk or _CHUNK, weight.size(0)),
    ).reshape(target.shape)
    losses = torch.where(counts, losses, 0.0)
    if reduction == "none":
        return losses.to(hidden.dtype)
    total = losses.sum()
    return (total if reduction == "sum" else total / counts.sum()).to(hidden.dtype)


def _check(hidden: Any, weight: Any, target: Any, bias: Any, reduction: str) -> None:
    if hidden.dim() < 1 or weight.dim() != 2 or weight.size(1) != hidden.size(-1):
        raise ValueError(
            "linear_cross_entropy takes hidden (..., features) and weight (vocabulary, features), "
            f"not {tuple(hidden.shape)} and {tuple(weight.shape)}."
        )
    if hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"linear_cross_entropy: target has the shape {tuple(target.shape)}, and hidden without "
            f"its features {tuple(hidden.shape[:-1])}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy: bias has the shape {tuple(bias.shape)}, not "
            f"{tuple(weight.shape[:1])}."
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"linear_cross_entropy: reduction={reduction!r}: mean, sum or none.")


def _losses(
    hidden: jax.Array,
    weight: jax.Array,
    target: jax.Array,
    bias: jax.Array | None,
    smoothing: float,
    softcap: float,
    chunk: int,
) -> jax.Array:
    """Loss of each row in the accumulating dtype."""
    largest, total, picked, mean = _statistics(hidden, weight, target, bias, softcap, chunk)
    normaliser = largest + jnp.log(total)
    return normaliser - (1 - smoothing) * picked - smoothing * mean


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _chunks(weight: jax.Array, bias: jax.Array | None, chunk: int) -> tuple[Any, Any, Any]:
    """First columns, weights and biases of the chunks; the last one is filled with zeros."""
    count = -(-weight.shape[0] // chunk)
    missing = count * chunk - weight.shape[0]
    bias = jnp.zeros(weight.shape[0], _wide(weight)) if bias is None else bias
    weights = jnp.pad(weight, ((0, missing), (0, 0))).reshape(count, chunk, -1)
    return jnp.arange(count) * chunk, weights, jnp.pad(bias, (0, missing)).reshape(count, chunk)


def _logits(
    hidden: jax.Array, weights: jax.Array, bias: jax.Array, softcap: float
) -> tuple[jax.Array, Any]:
    """Logits of a chunk, and the slope of the cap."""
    logits = lax.dot_general(
        hidden, weights, (((1,), (1,)), ((), ())), preferred_element_type=_wide(hidden)
    ) + bias.astype(_wide(hidden))
    if not softcap:
        return logits, 1.0
    bounded = jnp.tanh(logits / softcap)
    return softcap * bounded, 1 - bounded * bounded


def _statistics(
    hidden: jax.Array,
    weight: jax.Array,
    target: jax.Array,
    bias: jax.Array | None,
    softcap: float,
    chunk: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of each row's logits: the largest, the sum of exponentials below it, target's, and mean."""
    size = weight.shape[0]

    def step(carry: Any, part: Any) -> tuple[Any, None]:
        largest, total, picked, summed = carry
        first, weights, biases = part
        logits, _ = _logits(hidden, weights, biases, softcap)
        columns = first + jnp.arange(chunk)
        inside = columns < size
        above = jnp.maximum(largest, jnp.where(inside, logits, -jnp.inf).max(1))
        exponentials = jnp.where(inside, jnp.exp(logits - above[:, None]), 0)
        total = total * jnp.exp(largest - above) + exponentials.sum(1)
        picked = picked + jnp.where(columns == target[:, None], logits, 0).sum(1)
        return (above, total, picked, summed + jnp.where(inside, logits, 0).sum(1)), None

    zero = jnp.zeros(hidden.shape[0], _wide(hidden))
    start = (jnp.full_like(zero, -jnp.inf), zero, zero, zero)
    (largest, total, picked, summed), _ = lax.scan(step, start, _chunks(weight, bias, chunk))
    return largest, total, picked, summed / size


def _gradient(
    grad: jax.Array,
    hidden: jax.Array,
    weight: jax.Array,
    target: jax.Array,
    bias: jax.Array | None,
    smoothing: float,
    softcap: float,
    chunk: int,
) -> tuple[Any, ...]:
    largest, total, _, _ = _statistics(hidden, weight, target, bias, softcap, chunk)
    size = weight.shape[0]

    def step(grad_hidden: Any, part: Any) -> tuple[Any, Any]:
        first, weights, biases = part
        logits, slope = _logits(hidden, weights, biases, softcap)
        columns = first + jnp.arange(chunk)
        share = jnp.exp(logits - largest[:, None]) / total[:, None]
        share = share - (1 - smoothing) * (columns == target[:, None]) - smoothing / size
        share = jnp.where(columns < size, share * grad[:, None] * slope, 0)
        low = share.astype(hidden.dtype)
        into = functools.partial(lax.dot_general, preferred_element_type=_wide(hidden))
        grad_weights = into(low, hidden, (((0,), (0,)), ((), ()))).astype(weight.dtype)
        grad_hidden = grad_hidden + into(low, weights, (((1,), (0,)), ((), ())))
        return grad_hidden, (grad_weights, share.sum(0))

    start = jnp.zeros(hidden.shape, _wide(hidden))
    grad_hidden, (grad_weight, grad_bias) = lax.scan(step, start, _chunks(weight, bias, chunk))
    return (
        grad_hidden.astype(hidden.dtype),
        grad_weight.reshape(-1, weight.shape[1])[:size],
        None,
        None if bias is None else grad_bias.reshape(-1)[:size].astype(bias.dtype),
    )


_op = jax_op(
    "tpu_kernels::linear_cross_entropy", _losses, backward=_gradient, cast_inputs=torch.bfloat16
)
