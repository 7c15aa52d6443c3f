"""Lowerings of batch normalisation, of its backward and of the ops that SyncBatchNorm calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.normalization import Gradients, affine, input_gradient
from tpu_core.lowering.reduction import count_of, moments, sum_over
from tpu_core.lowering.registry import lowering

Optional = jax.Array | None


def _batch_axes(x: jax.Array) -> tuple[int, ...]:
    return tuple(a for a in range(x.ndim) if a != 1)


def _channels(x: jax.Array, like: jax.Array) -> jax.Array:
    """A value a channel, broadcastable to ``like`` and in the dtype it is computed in."""
    shape = (1, like.shape[1]) + (1,) * (like.ndim - 2)
    return lax.reshape(cast(x, op_math(like.dtype)), shape)


def _normalize(
    x: jax.Array, mean: jax.Array, rstd: jax.Array, weight: Optional, bias: Optional
) -> jax.Array:
    mean, rstd = _channels(mean, x), _channels(rstd, x)
    scale = rstd if weight is None else rstd * _channels(weight, x)
    return affine((cast(x, mean.dtype) - mean) * scale, None, bias, mean.shape)


def _rstd(variance: jax.Array, eps: Any) -> jax.Array:
    return lax.rsqrt(variance + cast(eps, variance.dtype))


def _running(old: jax.Array, new: jax.Array, momentum: Any) -> jax.Array:
    momentum = cast(momentum, new.dtype)
    return momentum * new + (np.asarray(1, new.dtype) - momentum) * cast(old, new.dtype)


def _unbiased(variance: jax.Array, count: int) -> jax.Array:
    # One value a channel gives 0 / 0, NaN, as in ATen.
    n = np.asarray(count, variance.dtype)
    return variance * n / (n - np.asarray(1, variance.dtype))


def _train(
    x: jax.Array, weight: Optional, bias: Optional, eps: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Result, mean, rstd and unbiased variance."""
    axes = _batch_axes(x)
    variance, mean = moments(x, axes)
    rstd = _rstd(variance, eps)
    unbiased = _unbiased(variance, count_of(x, axes))
    return _normalize(x, mean, rstd, weight, bias), mean, rstd, unbiased


def _evaluate(
    x: jax.Array,
    weight: Optional,
    bias: Optional,
    running_mean: jax.Array,
    running_var: jax.Array,
    eps: Any,
    saved_shape: tuple[int, ...],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    dtype = op_math(x.dtype)
    mean, rstd = cast(running_mean, dtype), _rstd(cast(running_var, dtype), eps)
    result = _normalize(x, mean, rstd, weight, bias)
    if saved_shape != mean.shape:  # The CPU saves nothing in evaluation mode.
        mean = rstd = jnp.zeros(saved_shape, dtype)
    return result, mean, rstd


@lowering("aten._native_batch_norm_legit_functional.default")
def batch_norm(
    x: jax.Array,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    training: bool,
    momentum: float,
    eps: float,
    *,
    out: Any,
) -> tuple[jax.Array, ...]:
    """Result, saved mean and rstd, and the running statistics' new values, if there are any."""
    if running_mean is None:
        return _train(x, weight, bias, eps)[:3]
    if not training:
        result = _evaluate(x, weight, bias, running_mean, running_var, eps, out[1].shape)
        return *result, running_mean, running_var
    result, mean, rstd, unbiased = _train(x, weight, bias, eps)
    return (
        result,
        mean,
        rstd,
        _running(running_mean, mean, momentum),
        _running(running_var, unbiased, momentum),
    )


@lowering("aten._native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    x: jax.Array, weight: Optional, bias: Optional, training: bool, momentum: float, eps: float
) -> tuple[jax.Array, ...]:
    # Without running statistics the batch's serve in evaluation mode too.
    return _train(x, weight, bias, eps)[:3]


@lowering("aten._native_batch_norm_legit_no_training.default")
def batch_norm_no_training(
    x: jax.Array,
    weight: Optional,
    bias: Optional,
    running_mean: jax.Array,
    running_var: jax.Array,
    momentum: float,
    eps: float,
    *,
    out: Any,
) -> tuple[jax.Array, ...]:
    return _evaluate(x, weight, bias, running_mean, running_var, eps, out[1].shape)


@lowering("aten._batch_norm_with_update_functional.default")
def batch_norm_with_update(
    x: jax.Array,
    weight: Optional,
    bias: Optional,
    running_mean: jax.Array,
    running_var: jax.Array,
    momentum: float,
    eps: float,
    *,
    out: Any,
) -> tuple[jax.Array, ...]:
    result, mean, rstd, new_mean, new_var = batch_norm(
        x, weight, bias, running_mean, running_var, True, momentum, eps, out=out
    )
    return result, mean, rstd, jnp.zeros(out[3].shape, np.uint8), new_mean, new_var


@lowering("aten._batch_norm_no_update.default")
def batch_norm_no_update(
    x: jax.Array,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    momentum: float,
    eps: float,
    *,
    out: Any,
) -> tuple[jax.Array, ...]:
    reserve = jnp.zeros(out[3].shape, np.uint8)
    if running_mean is None or running_var is None:
        return *_train(x, weight, bias, eps)[:3], reserve
    result = _evaluate(x, weight, bias, running_mean, running_var, eps, out[1].shape)
    return *result, reserve


@lowering("aten.native_batch_norm_backward.default")
def batch_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    weight: Optional,
    running_mean: Optional,
    running_var: Optional,
    save_mean: Optional,
    save_invstd: Optional,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Gradients:
    dtype, axes = op_math(x.dtype), _batch_axes(x)
    if train:
        mean, rstd = save_mean, save_invstd
    else:
        mean, rstd = running_mean, _rstd(cast(running_var, dtype), eps)
    mean, rstd, grad = _channels(mean, x), _channels(rstd, x), cast(grad, dtype)
    normalized = (cast(x, dtype) - mean) * rstd
    input_grad = None
    if output_mask[0]:
        scale = rstd if weight is None else rstd * _channels(weight, x)
        input_grad = input_gradient(grad, normalized, scale, axes) if train else grad * scale
    return (
        input_grad,
        sum_over(grad * normalized, axes) if output_mask[1] else None,
        sum_over(grad, axes) if output_mask[2] else None,
    )


@lowering("aten.batch_norm_backward.default")
def batch_norm_backward_reserve(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    running_mean: Optional,
    running_var: Optional,
    save_mean: Optional,
    save_var: Optional,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: jax.Array,
) -> Gradients:
    """Like the native one: ``save_var`` holds the reciprocal standard deviation."""
    return batch_norm_backward(
        grad, x, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )


@lowering("aten.batch_norm_stats.default")
def batch_norm_stats(x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """Mean and rstd a channel, in the dtype to compute in."""
    variance, mean = moments(x, _batch_axes(x))
    return mean, _rstd(variance, eps)


def gather_stats(
    mean: jax.Array,
    rstd: jax.Array,
    running_mean: Optional,
    running_var: Optional,
    momentum: Any,
    eps: Any,
    counts: jax.Array,
) -> tuple[jax.Array, jax.Array, Optional, Optional]:
    """Statistics of a batch from those of its parts (world, C), and the new running statistics."""
    dtype = op_math(mean.dtype)
    mean, rstd = cast(mean, dtype), cast(rstd, dtype)
    weights = lax.reshape(cast(counts, dtype), (mean.shape[0], 1))
    count = lax.reduce_sum(weights, (0, 1))
    average = sum_over(mean * weights, (0,)) / count
    variance = 1 / (rstd * rstd) - cast(eps, dtype)
    shift = mean - average
    square = sum_over((variance + shift * shift) * weights, (0,))
    result = average, _rstd(square / count, eps)
    if running_mean is not None:
        running_mean = _running(running_mean, average, momentum)
    if running_var is not None:
        unbiased = square / (count - np.asarray(1, dtype))
        running_var = _running(running_var, unbiased, momentum)
    return *result, running_mean, running_var


# These two write the running statistics without saying so in their schema, so that PyTorch has no
# functional overload of them; the lowering returns what is written last.
@lowering("tpu.batch_norm_gather_stats_with_counts.default")
def batch_norm_gather_stats_with_counts(
    x: jax.Array,
    mean: jax.Array,
    invstd: jax.Array,
    running_mean: Optional,
    running_var: Optional,
    momentum: float,
    eps: float,
    counts: jax.Array,
) -> tuple[jax.Array, ...]:
    results = gather_stats(mean, invstd, running_mean, running_var, momentum, eps, counts)
    return tuple(r for r in results if r is not None)


@lowering("tpu.batch_norm_update_stats.default")
def batch_norm_update_stats(
    x: jax.Array, running_mean: Optional, running_var: Optional, momentum: float
) -> tuple[jax.Array, ...]:
    """Mean and variance a channel, and the new running statistics."""
    axes = _batch_axes(x)
    variance, mean = moments(x, axes)
    written = []
    if running_mean is not None:
        written.append(_running(running_mean, mean, momentum))
    if running_var is not None:
        written.append(_running(running_var, _unbiased(variance, count_of(x, axes)), momentum))
    return mean, variance, *written


@lowering("aten.batch_norm_elemt.default")
def batch_norm_elemt(
    x: jax.Array,
    weight: Optional,
    bias: Optional,
    mean: jax.Array,
    invstd: jax.Array,
    eps: float,
) -> jax.Array:
    return _normalize(x, mean, invstd, weight, bias)


@lowering("aten.batch_norm_backward_reduce.default")
def batch_norm_backward_reduce(
    grad: jax.Array,
    x: jax.Array,
    mean: jax.Array,
    invstd: jax.Array,
    weight: Optional,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[jax.Array | None, ...]:
    """``sum(dy)``, ``sum(dy * (x - mean))`` and the gradients of weight and bias."""
    axes, grad = _batch_axes(x), cast(grad, op_math(x.dtype))
    total = sum_over(grad, axes)
    dot = sum_over(grad * (cast(x, grad.dtype) - _channels(mean, x)), axes)
    return (
        total if input_g else None,
        dot if input_g else None,
        dot * cast(invstd, dot.dtype) if weight_g else None,
        total if bias_g else None,
    )


@lowering("aten.batch_norm_backward_elemt.default")
def batch_norm_backward_elemt(
    grad: jax.Array,
    x: jax.Array,
    mean: jax.Array,
    invstd: jax.Array,
    weight: Optional,
    sum_dy: jax.Array,
    sum_dy_xmu: jax.Array,
    count: jax.Array,
) -> jax.Array:
    """Gradient of the input from the sums over all processes."""
    dtype = op_math(x.dtype)
    norm = 1 / lax.reduce_sum(cast(count, dtype), tuple(range(count.ndim)))
    mean, rstd = _channels(mean, x), _channels(invstd, x)
    mean_dy, mean_dot = _channels(sum_dy, x) * norm, _channels(sum_dy_xmu, x) * norm
    scale = rstd if weight is None else rstd * _channels(weight, x)
    centered = cast(x, dtype) - mean
    return (cast(grad, dtype) - mean_dy - centered * (rstd * rstd * mean_dot)) * scale
