"""Fused optimizer steps and the gradient scaler's ops.

The functional overloads return every list that the in-place op writes. Formulas are those of
aten/src/ATen/native/cuda/fused_adam_utils.cuh, FusedSgdKernel.cu and the CPU's FusedAdagrad; with
``found_inf`` set nothing changes, gradients included.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.registry import lowering
from tpu_core.lowering.ternary import interpolate

Array = jax.Array


def _keep_on_overflow(found_inf: Array | None, old: Array, new: Array) -> Array:
    new = cast(new, old.dtype)
    return new if found_inf is None else jnp.where(jnp.squeeze(found_inf) == 1, old, new)


def _unscaled(grad: Array, grad_scale: Array | None, dtype: Any) -> Array:
    grad = cast(grad, dtype)
    return grad if grad_scale is None else grad / cast(jnp.squeeze(grad_scale), dtype)


def _is_zero(x: Any) -> bool:
    return isinstance(x, (int, float)) and x == 0


def _decayed(grad: Array, param: Array, weight_decay: Any) -> Array:
    """Gradient with the L2 penalty; nothing is computed for the constant 0."""
    return grad if _is_zero(weight_decay) else grad + param * cast(weight_decay, param.dtype)


def _scalar(x: Any, dtype: Any) -> Array:
    return cast(jnp.squeeze(x) if isinstance(x, jax.Array) else x, dtype)


def _one_minus_power(one_minus_beta: Array, step: Array) -> Array:
    """``1 - beta**step`` to full relative precision: the plain form loses four digits at step 1."""
    return -jnp.expm1(step * jnp.log1p(-one_minus_beta))


def _adam(
    self: Sequence[Array],
    grads: Sequence[Array],
    exp_avgs: Sequence[Array],
    exp_avg_sqs: Sequence[Array],
    max_exp_avg_sqs: Sequence[Array],
    state_steps: Sequence[Array],
    lr: Any,
    beta1: Any,
    beta2: Any,
    weight_decay: Any,
    eps: Any,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Array | None,
    found_inf: Array | None,
    decoupled: bool,
) -> tuple[list[Array], ...]:
    # The differences are taken before rounding to the computing dtype.
    numbers = (lr, 1 - beta1, 1 - beta2, eps, weight_decay)
    in_dtype = functools.cache(lambda dtype: tuple(_scalar(x, dtype) for x in numbers))
    results: tuple[list[Array], ...] = ([], [], [], [], [])
    for i, (stored, stored_grad) in enumerate(zip(self, grads, strict=True)):
        dtype = op_math(stored.dtype)
        rate, weight1, weight2, small, decay = in_dtype(dtype)
        param, grad = cast(stored, dtype), _unscaled(stored_grad, grad_scale, dtype)
        kept_grad = grad
        grad = -grad if maximize else grad
        if not decoupled:
            grad = _decayed(grad, param, weight_decay)
        elif not _is_zero(weight_decay):
            param = param - rate * decay * param
        average = interpolate(cast(exp_avgs[i], dtype), grad, weight1)
        square = interpolate(cast(exp_avg_sqs[i], dtype), grad * grad, weight2)
        largest = jnp.maximum(cast(max_exp_avg_sqs[i], dtype), square) if amsgrad else square
        step = _scalar(state_steps[i], dtype)
        correction1 = _one_minus_power(weight1, step)
        correction2 = jnp.sqrt(_one_minus_power(weight2, step))
        denominator = jnp.sqrt(largest) / correction2 + small
        param = param - (rate / correction1) * average / denominator
        news = [param, kept_grad, average, square, largest]
        olds = [stored, stored_grad, exp_avgs[i], exp_avg_sqs[i]]
        if amsgrad:
            olds.append(max_exp_avg_sqs[i])
        for result, old, new in zip(results, olds, news):
            result.append(_keep_on_overflow(found_inf, old, new))
    if not amsgrad:
        results[4].extend(max_exp_avg_sqs)
    return results


@lowering("aten._fused_adam.default", "aten._fused_adam.tensor_lr")
def fused_adam(
    self: Sequence[Array],
    grads: Sequence[Array],
    exp_avgs: Sequence[Array],
    exp_avg_sqs: Sequence[Array],
    max_exp_avg_sqs: Sequence[Array],
    state_steps: Sequence[Array],
    *,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
    **options: Any,
) -> tuple[list[Array], ...]:
    lists = (self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
    scaling = {"grad_scale": grad_scale, "found_inf": found_inf}
    return _adam(*lists, **options, **scaling, decoupled=False)


@lowering("aten._fused_adamw.default", "aten._fused_adamw.tensor_lr")
def fused_adamw(
    self: Sequence[Array],
    grads: Sequence[Array],
    exp_avgs: Sequence[Array],
    exp_avg_sqs: Sequence[Array],
    max_exp_avg_sqs: Sequence[Array],
    state_steps: Sequence[Array],
    *,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
    **options: Any,
) -> tuple[list[Array], ...]:
    lists = (self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
    scaling = {"grad_scale": grad_scale, "found_inf": found_inf}
    return _adam(*lists, **options, **scaling, decoupled=True)


@lowering("aten._fused_sgd.default", "aten._fused_sgd.tensor_lr")
def fused_sgd(
    self: Sequence[Array],
    grads: Sequence[Array],
    momentum_buffer_list: Sequence[Array],
    *,
    weight_decay: Any,
    momentum: Any,
    lr: Any,
    dampening: Any,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> tuple[list[Array], list[Array], list[Array]]:
    params, kept_grads, buffers = [], [], []
    for i, (stored, stored_grad) in enumerate(zip(self, grads, strict=True)):
        dtype = op_math(stored.dtype)
        param, grad = cast(stored, dtype), _unscaled(stored_grad, grad_scale, dtype)
        kept_grads.append(_keep_on_overflow(found_inf, stored_grad, grad))
        grad = _decayed(-grad if maximize else grad, param, weight_decay)
        if momentum_buffer_list:
            held, factor = momentum_buffer_list[i], cast(momentum, dtype)
            buffer = grad
            if not is_first_step:
                buffer = cast(held, dtype) * factor + cast(1 - dampening, dtype) * grad
            buffers.append(_keep_on_overflow(found_inf, held, buffer))
            grad = grad + factor * buffer if nesterov else buffer
        params.append(_keep_on_overflow(found_inf, stored, param - _scalar(lr, dtype) * grad))
    return params, kept_grads, buffers


@lowering("aten._fused_adagrad.default", "aten._fused_adagrad.tensor_lr")
def fused_adagrad(
    self: Sequence[Array],
    grads: Sequence[Array],
    state_sums: Sequence[Array],
    state_steps: Sequence[Array],
    *,
    lr: Any,
    lr_decay: Any,
    weight_decay: Any,
    eps: Any,
    maximize: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
    out: Any,
) -> tuple[list[Array], ...]:
    params, kept_grads, sums = [], [], []
    for i, (stored, stored_grad) in enumerate(zip(self, grads, strict=True)):
        dtype = op_math(stored.dtype)
        param, grad = cast(stored, dtype), _unscaled(stored_grad, grad_scale, dtype)
        kept_grads.append(_keep_on_overflow(found_inf, stored_grad, grad))
        grad = _decayed(-grad if maximize else grad, param, weight_decay)
        step = _scalar(state_steps[i], dtype)
        rate = _scalar(lr, dtype) / (1 + (step - 1) * cast(lr_decay, dtype))
        total = cast(state_sums[i], dtype) + grad * grad
        param = param - rate * grad / (jnp.sqrt(total) + cast(eps, dtype))
        params.append(_keep_on_overflow(found_inf, stored, param))
        sums.append(_keep_on_overflow(found_inf, state_sums[i], total))
    # Only the overload with a number for ``lr`` returns the steps too.
    return (params, kept_grads, sums, list(state_steps))[: len(out)]


# --- Gradient scaler (aten/src/ATen/native/cuda/AmpKernels.cu)


@lowering("aten._amp_foreach_non_finite_check_and_unscale.default")
def amp_unscale(
    self: Sequence[Array], found_inf: Array, inv_scale: Array
) -> tuple[list[Array], Array]:
    overflow = found_inf != 0
    grads = []
    for stored in self:
        overflow = overflow | ~jnp.all(jnp.isfinite(stored))
        dtype = op_math(stored.dtype)
        grads.append(cast(cast(stored, dtype) * _scalar(inv_scale, dtype), stored.dtype))
    return grads, jnp.where(overflow, jnp.ones_like(found_inf), found_inf)


@lowering("aten._amp_update_scale.default")
def amp_update_scale(
    self: Array,
    growth_tracker: Array,
    found_inf: Array,
    scale_growth_factor: Any,
    scale_backoff_factor: Any,
    growth_interval: int,
) -> tuple[Array, Array]:
    overflow = jnp.reshape(found_inf, self.shape) != 0
    successes = growth_tracker + 1
    due = successes == growth_interval
    grown = self * cast(scale_growth_factor, self.dtype)
    # A scale that would overflow stays.
    grown = jnp.where(jnp.reshape(due, self.shape) & jnp.isfinite(grown), grown, self)
    scale = jnp.where(overflow, self * cast(scale_backoff_factor, self.dtype), grown)
    restart = due | jnp.reshape(overflow, due.shape)
    return scale, jnp.where(restart, jnp.zeros_like(growth_tracker), successes)
