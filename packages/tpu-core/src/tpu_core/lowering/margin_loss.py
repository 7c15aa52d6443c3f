"""Lowerings of the multi-class and multi-label margin losses and of their backward ops.

A class index out of range is clamped: XLA cannot raise inside a program.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.loss import MEAN, NONE, class_weight, pick
from tpu_core.lowering.reduction import mean_over, sum_over
from tpu_core.lowering.registry import lowering


def _rows(x: jax.Array) -> jax.Array:
    return lax.reshape(x, (1,) * (2 - x.ndim) + x.shape)


def _reduce_rows(loss: jax.Array, reduction: int, out: Any) -> jax.Array:
    """A loss a row, reduced; a single row's loss is 0-d."""
    if reduction == NONE:
        return lax.reshape(loss, out[0].shape)
    return mean_over(loss, (0,)) if reduction == MEAN else sum_over(loss, (0,))


def _row_grad(grad: jax.Array, rows: int, reduction: int, dtype: Any) -> jax.Array:
    """The gradient that reaches each row, (rows, 1) or (1, 1)."""
    grad = cast(grad, dtype)
    if reduction == MEAN:
        grad = grad / np.asarray(max(rows, 1), dtype)
    return lax.reshape(grad, (grad.size, 1))


def _margins(
    x: jax.Array, target: jax.Array, margin: Any, weight: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``max(0, margin - x[target] + x)`` off the target, where the target is, and row weights."""
    label = lax.expand_dims(target.astype(np.int32), (1,))
    hit = lax.broadcasted_iota(np.int32, x.shape, 1) == label
    margins = cast(margin, x.dtype) - lax.expand_dims(pick(x, target, 1), (1,)) + x
    zero = jnp.zeros((), x.dtype)
    margins = jnp.where(hit | (margins < 0), zero, margins)
    scale = jnp.ones((1, 1), x.dtype)
    if weight is not None:
        scale = lax.expand_dims(class_weight(cast(weight, x.dtype), target), (1,))
    return margins, hit, scale / np.asarray(x.shape[1], x.dtype)


@lowering("aten.multi_margin_loss.default", static=("p",))
def multi_margin_loss(
    x: jax.Array,
    target: jax.Array,
    p: float = 1,
    margin: float = 1,
    weight: jax.Array | None = None,
    reduction: int = MEAN,
    *,
    out: Any,
) -> jax.Array:
    rows = _rows(cast(x, op_math(x.dtype)))
    target = lax.reshape(target, (rows.shape[0],))
    margins, _, scale = _margins(rows, target, margin, weight)
    loss = sum_over((margins if p == 1 else margins * margins) * scale, (1,))
    return _reduce_rows(loss, reduction, out)


@lowering("aten.multi_margin_loss_backward.default", static=("p",))
def multi_margin_loss_backward(
    grad: jax.Array,
    x: jax.Array,
    target: jax.Array,
    p: float,
    margin: float,
    weight: jax.Array | None = None,
    reduction: int = MEAN,
) -> jax.Array:
    rows = _rows(cast(x, op_math(x.dtype)))
    target = lax.reshape(target, (rows.shape[0],))
    margins, hit, scale = _margins(rows, target, margin, weight)
    slope = (margins > 0).astype(rows.dtype) if p == 1 else 2 * margins
    slope = slope * scale * _row_grad(grad, rows.shape[0], reduction, rows.dtype)
    slope = jnp.where(hit, -sum_over(slope, (1,), keepdim=True), slope)
    return lax.reshape(slope, x.shape)


def _labels(x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Row labels before the first -1 (others -1), and (N, label, class) one-hot of them."""
    count = x.shape[1]
    before = lax.cumsum((target < 0).astype(np.int32), axis=1) == 0
    label = jnp.where(before, target, -1).astype(np.int32)
    hot = lax.broadcasted_iota(np.int32, (*x.shape, count), 2) == lax.expand_dims(label, (2,))
    return label, hot


def _label_margins(
    x: jax.Array, label: jax.Array, hot: jax.Array, is_target: jax.Array
) -> jax.Array:
    """(N, label, class): ``max(0, 1 - x[label] + x[class])`` over the classes of no label."""
    zero = jnp.zeros((), x.dtype)
    chosen = sum_over(jnp.where(hot, lax.expand_dims(x, (1,)), zero), (2,), keepdim=True)
    margins = 1 - chosen + lax.expand_dims(x, (1,))
    valid = lax.expand_dims(label >= 0, (2,)) & ~lax.expand_dims(is_target, (1,))
    return jnp.where(valid & (margins > 0), margins, zero)


@lowering("aten.multilabel_margin_loss_forward.default")
def multilabel_margin_loss(
    x: jax.Array, target: jax.Array, reduction: int, *, out: Any
) -> tuple[jax.Array, jax.Array]:
    rows = _rows(cast(x, op_math(x.dtype)))
    label, hot = _labels(rows, _rows(target))
    is_target = lax.reduce_or(hot, (1,))
    margins = _label_margins(rows, label, hot, is_target)
    loss = sum_over(margins, (1, 2)) / np.asarray(rows.shape[1], rows.dtype)
    return _reduce_rows(loss, reduction, out), lax.reshape(is_target, target.shape)


@lowering("aten.multilabel_margin_loss_backward.default")
def multilabel_margin_loss_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, is_target: jax.Array
) -> jax.Array:
    rows = _rows(cast(x, op_math(x.dtype)))
    label, hot = _labels(rows, _rows(target))
    active = _label_margins(rows, label, hot, _rows(is_target) != 0) > 0
    active = active.astype(rows.dtype)
    zero = jnp.zeros((), rows.dtype)
    chosen = jnp.where(hot, sum_over(active, (2,), keepdim=True), zero)
    slope = sum_over(active - chosen, (1,)) / np.asarray(rows.shape[1], rows.dtype)
    slope = slope * _row_grad(grad, rows.shape[0], reduction, rows.dtype)
    return lax.reshape(slope, x.shape)
