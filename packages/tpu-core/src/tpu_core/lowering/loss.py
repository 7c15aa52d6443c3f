"""Lowerings of the losses and of their backward ops; CTC is in ctc.py.

A class index out of range is clamped: XLA cannot raise inside a program. Reductions are ATen's
numbers (``at::Reduction``): 0 none, 1 mean, 2 sum.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.reduction import mean_over, sum_over
from tpu_core.lowering.registry import lowering

NONE, MEAN, SUM = 0, 1, 2


def _operands(out: Any, *values: Any) -> list[jax.Array]:
    """``values`` in the dtype to compute the first result in."""
    dtype = op_math(out[0].dtype)
    return [cast(v, dtype) for v in values]


def _reduce(loss: jax.Array, reduction: int) -> jax.Array:
    axes = tuple(range(loss.ndim))
    if reduction == MEAN:
        return mean_over(loss, axes)
    return sum_over(loss, axes) if reduction == SUM else loss


def _scale(grad: jax.Array, x: jax.Array, reduction: int) -> jax.Array:
    """The gradient that reaches each element through the reduction."""
    return grad / np.asarray(max(x.size, 1), grad.dtype) if reduction == MEAN else grad


def pick(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """``x[..., index, ...]`` at every position of the other axes; ``index`` is clamped."""
    others = tuple(a for a in range(x.ndim) if a != axis)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(axis,),
        start_index_map=(axis,),
        operand_batching_dims=others,
        start_indices_batching_dims=tuple(range(len(others))),
    )
    index = lax.expand_dims(index.astype(np.int32), (index.ndim,))
    return lax.gather(x, index, numbers, (1,) * x.ndim, mode=lax.GatherScatterMode.CLIP)


def _pick_by_comparison(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """As `pick`; it fuses with what makes ``x``, which a gather reads from memory."""
    index = jnp.clip(index, 0, x.shape[axis] - 1).astype(np.int32)
    hit = lax.broadcasted_iota(np.int32, x.shape, axis) == lax.expand_dims(index, (axis,))
    return sum_over(jnp.where(hit, x, jnp.zeros((), x.dtype)), (axis,))


def class_weight(weight: jax.Array, target: jax.Array) -> jax.Array:
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    index = lax.expand_dims(target.astype(np.int32), (target.ndim,))
    return lax.gather(weight, index, numbers, (1,), mode=lax.GatherScatterMode.CLIP)


@lowering("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll_loss(
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None,
    reduction: int,
    ignore_index: int,
    *,
    out: Any,
) -> tuple[jax.Array, jax.Array]:
    """Loss and total weight of log-probabilities (C), (N, C) or (N, C, H, W)."""
    dtype = op_math(x.dtype)
    axis = 1 if x.ndim > 1 else 0
    target = lax.reshape(target, x.shape[:axis] + x.shape[axis + 1 :])
    counted = target != ignore_index
    zero = jnp.zeros((), dtype)
    if x.size:
        by_gather, by_comparison = (
            functools.partial(f, axis=axis) for f in (pick, _pick_by_comparison)
        )
        # On a TPU log_softmax would go to memory for the sake of the gather alone.
        found = lax.platform_dependent(x, target, cpu=by_gather, default=by_comparison)
        picked = cast(found, dtype)
    else:
        picked = jnp.zeros(target.shape, dtype)
    weights = jnp.where(counted, np.ones((), dtype), zero)
    if weight is not None:
        weights = jnp.where(counted, class_weight(cast(weight, dtype), target), zero)
    # A select, not a product: an ignored -inf must not give NaN.
    losses = jnp.where(counted, -picked * weights, zero)
    if reduction == NONE and x.ndim > 1:
        return losses, zero
    axes = tuple(range(target.ndim))
    total, total_weight = sum_over(losses, axes), sum_over(weights, axes)
    return (total / total_weight if reduction == MEAN else total), total_weight


@lowering("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def nll_loss_backward(
    grad: jax.Array,
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: jax.Array,
) -> jax.Array:
    """A comparison with an iota, not a scatter: it fuses with log_softmax's backward."""
    dtype = op_math(x.dtype)
    axis = 1 if x.ndim > 1 else 0
    target = lax.reshape(target, x.shape[:axis] + x.shape[axis + 1 :])
    grad = -cast(grad, dtype)
    if reduction == MEAN:
        grad = grad / cast(total_weight, dtype)
    if reduction == NONE and x.ndim > 1:
        grad = lax.expand_dims(grad, (axis,))
    else:
        grad = lax.reshape(grad, ())
    if weight is not None:
        shape = [1] * x.ndim
        shape[axis] = x.shape[axis]
        grad = grad * lax.reshape(cast(weight, dtype), shape)
    counted = target != ignore_index
    # Classes fit int32, which TPUs compare natively.
    label = jnp.where(counted, target, -1).astype(np.int32)
    hit = lax.broadcasted_iota(np.int32, x.shape, axis) == lax.expand_dims(label, (axis,))
    return jnp.where(hit, grad, jnp.zeros((), dtype))


@lowering("aten.mse_loss.default")
def mse_loss(x: jax.Array, target: jax.Array, reduction: int = MEAN, *, out: Any) -> jax.Array:
    x, target = _operands(out, x, target)
    difference = x - target
    return _reduce(difference * difference, reduction)


@lowering("aten.mse_loss_backward.default")
def mse_loss_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, *, out: Any
) -> jax.Array:
    grad, x, target = _operands(out, grad, x, target)
    return 2 * (x - target) * _scale(grad, x, reduction)


@lowering("aten.smooth_l1_loss.default")
def smooth_l1_loss(
    x: jax.Array, target: jax.Array, reduction: int = MEAN, beta: float = 1.0, *, out: Any
) -> jax.Array:
    x, target, beta = _operands(out, x, target, beta)
    size = lax.abs(x - target)
    # With beta 0 the quadratic branch is never taken.
    loss = jnp.where(size < beta, 0.5 * size * size / beta, size - 0.5 * beta)
    return _reduce(loss, reduction)


@lowering("aten.smooth_l1_loss_backward.default")
def smooth_l1_loss_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, beta: float, *, out: Any
) -> jax.Array:
    grad, x, target, beta = _operands(out, grad, x, target, beta)
    grad, difference = _scale(grad, x, reduction), x - target
    # Not lax.clamp: beta 0 must give the sign that ATen gives at 0 (PointwiseOpsKernel.cpp).
    inner = jnp.where(difference >= beta, grad, difference * grad / beta)
    return jnp.where(difference <= -beta, -grad, inner)


@lowering("aten.huber_loss.default")
def huber_loss(
    x: jax.Array, target: jax.Array, reduction: int = MEAN, delta: float = 1.0, *, out: Any
) -> jax.Array:
    x, target, delta = _operands(out, x, target, delta)
    size = lax.abs(x - target)
    loss = jnp.where(size <= delta, 0.5 * size * size, delta * (size - 0.5 * delta))
    return _reduce(loss, reduction)


@lowering("aten.huber_loss_backward.default")
def huber_loss_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, delta: float, *, out: Any
) -> jax.Array:
    grad, x, target, delta = _operands(out, grad, x, target, delta)
    difference = x - target
    slope = jnp.minimum(jnp.maximum(difference, -delta), delta)
    return slope * _scale(grad, x, reduction)


@lowering("aten.binary_cross_entropy.default")
def binary_cross_entropy(
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    reduction: int = MEAN,
    *,
    out: Any,
) -> jax.Array:
    x, target = _operands(out, x, target)
    floor = np.asarray(-100, x.dtype)  # ATen clamps the logarithms (Loss.cpp).
    loss = (target - 1) * jnp.maximum(lax.log1p(-x), floor)
    loss = loss - target * jnp.maximum(lax.log(x), floor)
    if weight is not None:
        loss = loss * cast(weight, loss.dtype)
    return _reduce(loss, reduction)


@lowering("aten.binary_cross_entropy_backward.default")
def binary_cross_entropy_backward(
    grad: jax.Array,
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    reduction: int = MEAN,
    *,
    out: Any,
) -> jax.Array:
    grad, x, target = _operands(out, grad, x, target)
    slope = (x - target) / jnp.maximum((1 - x) * x, np.asarray(1e-12, x.dtype))
    if weight is not None:
        slope = slope * cast(weight, slope.dtype)
    return slope * _scale(grad, x, reduction)


@lowering("aten.binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    pos_weight: jax.Array | None = None,
    reduction: int = MEAN,
    *,
    out: Any,
) -> jax.Array:
    x, target = _operands(out, x, target)
    log_sigmoid = jnp.minimum(x, 0) - lax.log1p(lax.exp(-lax.abs(x)))
    if pos_weight is not None:
        log_sigmoid = log_sigmoid * ((cast(pos_weight, x.dtype) - 1) * target + 1)
    loss = (1 - target) * x - log_sigmoid
    if weight is not None:
        loss = loss * cast(weight, x.dtype)
    return _reduce(loss, reduction)


@lowering("aten.soft_margin_loss.default")
def soft_margin_loss(
    x: jax.Array, target: jax.Array, reduction: int = MEAN, *, out: Any
) -> jax.Array:
    x, target = _operands(out, x, target)
    return _reduce(lax.log1p(lax.exp(-x * target)), reduction)


@lowering("aten.soft_margin_loss_backward.default")
def soft_margin_loss_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, *, out: Any
) -> jax.Array:
    grad, x, target = _operands(out, grad, x, target)
    return -target * lax.logistic(-x * target) * _scale(grad, x, reduction)
