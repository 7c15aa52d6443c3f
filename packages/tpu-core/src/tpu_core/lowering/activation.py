"""Activation functions and their gradients.

Formulas are those of aten/src/ATen/native/cpu/Activation.cpp unless noted, with the same choices at
the kinks. All compute in float32 where the tensors are shorter.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, compute
from tpu_core.lowering.random import uniform01
from tpu_core.lowering.registry import lowering

Array = jax.Array


# --- relu and threshold


@lowering("aten.relu.default")
def relu(self: Array) -> Array:
    return jnp.maximum(self, jnp.zeros((), self.dtype))


@lowering("aten.threshold.default")
def threshold(self: Array, threshold: Any, value: Any) -> Array:
    # A NaN is not below the threshold: it passes.
    return jnp.where(self <= cast(threshold, self.dtype), cast(value, self.dtype), self)


@lowering("aten.threshold_backward.default")
def threshold_backward(grad_output: Array, self: Array, threshold: Any) -> Array:
    below = self <= cast(threshold, self.dtype)
    return jnp.where(below, jnp.zeros((), grad_output.dtype), grad_output)


@lowering("aten.leaky_relu.default")
def leaky_relu(self: Array, negative_slope: Any = 0.01) -> Array:
    (x,) = compute(self)
    return jnp.where(x > 0, x, x * cast(negative_slope, x.dtype))


@lowering("aten.leaky_relu_backward.default")
def leaky_relu_backward(
    grad_output: Array, self: Array, negative_slope: Any, self_is_result: bool
) -> Array:
    grad, x = compute(grad_output, self)
    return jnp.where(x > 0, grad, grad * cast(negative_slope, x.dtype))


@lowering("aten._prelu_kernel.default")
def prelu(self: Array, weight: Array) -> Array:
    x, slope = compute(self, weight)
    return jnp.where(x > 0, x, slope * x)


@lowering("aten._prelu_kernel_backward.default")
def prelu_backward(grad_output: Array, self: Array, weight: Array) -> tuple[Array, Array]:
    grad, x, slope = compute(grad_output, self, weight)
    return jnp.where(x > 0, grad, slope * grad), jnp.where(x > 0, jnp.zeros_like(x), x * grad)


@lowering("aten.rrelu_with_noise_functional.default", random=True)
def rrelu_with_noise(
    self: Array,
    noise: Array,
    lower: Any = 0.125,
    upper: Any = 1 / 3,
    training: bool = False,
    *,
    key: Array,
) -> tuple[Array, Array]:
    (x,) = compute(self)
    lower, upper = cast(lower, x.dtype), cast(upper, x.dtype)
    if not training:
        return jnp.where(x > 0, x, x * ((lower + upper) / 2)), noise
    slope = lower + (upper - lower) * uniform01(key, x.shape, x.dtype)
    slope = jnp.where(x <= 0, slope, jnp.ones_like(slope))
    return x * slope, slope


@lowering("aten.rrelu_with_noise_backward.default")
def rrelu_with_noise_backward(
    grad_output: Array,
    self: Array,
    noise: Array,
    lower: Any,
    upper: Any,
    training: bool,
    self_is_result: bool,
) -> Array:
    # aten/src/ATen/native/Activation.cpp; a degenerate interval is a leaky relu there.
    grad, x, factor = compute(grad_output, self, noise)
    lower, upper = cast(lower, x.dtype), cast(upper, x.dtype)
    leaky = leaky_relu_backward(grad, x, (lower + upper) / 2, self_is_result)
    if not training:
        return leaky
    return jnp.where(upper - lower > 1e-6, grad * factor, leaky)


# --- gelu, silu, mish
#
# silu_backward and mish_backward are CompositeImplicitAutograd: with a kernel of its own, a direct
# call of them is no longer differentiable, as on the CPU. silu and mish themselves are unaffected:
# their formulas reach these ops only where no graph is being built.


_SQRT_HALF = math.sqrt(0.5)
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715


@lowering("aten.gelu.default")
def gelu(self: Array, *, approximate: str = "none") -> Array:
    (x,) = compute(self)
    if approximate == "tanh":
        inner = _TANH_SCALE * (x + _TANH_CUBIC * x * x * x)
        return 0.5 * x * (1 + jnp.tanh(inner))
    return 0.5 * x * (1 + lax.erf(x * _SQRT_HALF))


@lowering("aten.gelu_backward.default")
def gelu_backward(grad_output: Array, self: Array, *, approximate: str = "none") -> Array:
    grad, x = compute(grad_output, self)
    if approximate == "tanh":
        tanh = jnp.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x * x * x))
        inner = _TANH_SCALE * (1 + 3 * _TANH_CUBIC * x * x)
        return grad * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner)
    cdf = 0.5 * (1 + lax.erf(x * _SQRT_HALF))
    pdf = jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return grad * (cdf + x * pdf)


@lowering("aten.silu.default")
def silu(self: Array) -> Array:
    (x,) = compute(self)
    return x * lax.logistic(x)


@lowering("aten.silu_backward.default")
def silu_backward(grad_output: Array, self: Array) -> Array:
    grad, x = compute(grad_output, self)
    sigmoid = lax.logistic(x)
    return grad * sigmoid * (1 + x * (1 - sigmoid))


def _softplus(x: Array) -> Array:
    return jnp.maximum(x, jnp.zeros((), x.dtype)) + jnp.log1p(jnp.exp(-jnp.abs(x)))


@lowering("aten.mish.default")
def mish(self: Array) -> Array:
    (x,) = compute(self)
    return x * jnp.tanh(_softplus(x))


@lowering("aten.mish_backward.default")
def mish_backward(grad_output: Array, self: Array) -> Array:
    grad, x = compute(grad_output, self)
    tanh = jnp.tanh(_softplus(x))
    return grad * (tanh + x * lax.logistic(x) * (1 - tanh * tanh))


# --- sigmoid and tanh


@lowering("aten.sigmoid_backward.default")
def sigmoid_backward(grad_output: Array, output: Array) -> Array:
    grad, y = compute(grad_output, output)
    return grad * jnp.conj((1 - y) * y)


@lowering("aten.tanh_backward.default")
def tanh_backward(grad_output: Array, output: Array) -> Array:
    grad, y = compute(grad_output, output)
    return grad * jnp.conj(1 - y * y)


@lowering("aten.log_sigmoid_forward.default")
def log_sigmoid_forward(self: Array, *, out: Any) -> tuple[Array, Array]:
    (x,) = compute(self)
    # The buffer is the CPU's; other devices leave it empty. The gradient does without.
    buffer = jnp.exp(-jnp.abs(x)) if out[1].shape == x.shape else jnp.zeros(out[1].shape, x.dtype)
    return -_softplus(-x), buffer


@lowering("aten.log_sigmoid_backward.default")
def log_sigmoid_backward(grad_output: Array, self: Array, buffer: Array) -> Array:
    grad, x = compute(grad_output, self)
    return grad * lax.logistic(-x)


@lowering("aten.logit_backward.default")
def logit_backward(grad_output: Array, self: Array, eps: Any = None) -> Array:
    grad, x = compute(grad_output, self)
    inner = grad / (x * (1 - x))
    # aten/src/ATen/native/cpu/BinaryOpsKernel.cpp: the ends themselves have an infinite slope.
    inner = jnp.where((x == 0) | (x == 1), grad * jnp.inf, inner)
    if eps is None:
        return jnp.where((x < 0) | (x > 1), jnp.full((), jnp.nan, x.dtype), inner)
    eps = cast(eps, x.dtype)
    return jnp.where((x < eps) | (x > 1 - eps), jnp.zeros((), x.dtype), inner)


# --- Exponential units


@lowering("aten.elu.default")
def elu(self: Array, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Array:
    (x,) = compute(self)
    alpha, scale, input_scale = (cast(v, x.dtype) for v in (alpha, scale, input_scale))
    return jnp.where(x <= 0, jnp.expm1(x * input_scale) * (alpha * scale), x * scale)


@lowering("aten.elu_backward.default")
def elu_backward(
    grad_output: Array,
    alpha: Any,
    scale: Any,
    input_scale: Any,
    is_result: bool,
    self_or_result: Array,
) -> Array:
    grad, x = compute(grad_output, self_or_result)
    alpha, scale, input_scale = (cast(v, x.dtype) for v in (alpha, scale, input_scale))
    if is_result:
        negative = grad * input_scale * (x + alpha * scale)
    else:
        negative = grad * input_scale * (alpha * scale) * jnp.exp(x * input_scale)
    return jnp.where(x <= 0, negative, grad * scale)


@lowering("aten.celu.default")
def celu(self: Array, alpha: Any = 1.0) -> Array:
    (x,) = compute(self)
    alpha = cast(alpha, x.dtype)
    return elu(x, alpha, 1, 1 / alpha)


@lowering("aten.softplus.default")
def softplus(self: Array, beta: Any = 1, threshold: Any = 20) -> Array:
    (x,) = compute(self)
    beta = cast(beta, x.dtype)
    scaled = x * beta
    return jnp.where(scaled > cast(threshold, x.dtype), x, jnp.log1p(jnp.exp(scaled)) / beta)


@lowering("aten.softplus_backward.default")
def softplus_backward(grad_output: Array, self: Array, beta: Any, threshold: Any) -> Array:
    grad, x = compute(grad_output, self)
    scaled = x * cast(beta, x.dtype)
    return jnp.where(scaled > cast(threshold, x.dtype), grad, grad * lax.logistic(scaled))


# --- Piecewise linear


@lowering("aten.hardtanh.default")
def hardtanh(self: Array, min_val: Any = -1, max_val: Any = 1) -> Array:
    low, high = cast(min_val, self.dtype), cast(max_val, self.dtype)
    return jnp.minimum(jnp.maximum(self, low), high)


@lowering("aten.hardtanh_backward.default")
def hardtanh_backward(grad_output: Array, self: Array, min_val: Any, max_val: Any) -> Array:
    grad, x = compute(grad_output, self)
    outside = (x <= cast(min_val, x.dtype)) | (x >= cast(max_val, x.dtype))
    return jnp.where(outside, jnp.zeros((), grad.dtype), grad)


def _clip(x: Array, low: float, high: float) -> Array:
    return jnp.minimum(jnp.maximum(x, jnp.asarray(low, x.dtype)), jnp.asarray(high, x.dtype))


@lowering("aten.hardsigmoid.default")
def hardsigmoid(self: Array) -> Array:
    (x,) = compute(self)
    return _clip(x + 3, 0, 6) / 6


@lowering("aten.hardsigmoid_backward.default")
def hardsigmoid_backward(grad_output: Array, self: Array) -> Array:
    grad, x = compute(grad_output, self)
    sixth = float(np.float32(1 / 6))  # ATen's constant is of float32 in every dtype
    return jnp.where((x > -3) & (x < 3), grad * sixth, jnp.zeros((), grad.dtype))


@lowering("aten.hardswish.default")
def hardswish(self: Array) -> Array:
    (x,) = compute(self)
    return x * _clip(x + 3, 0, 6) / 6


@lowering("aten.hardswish_backward.default")
def hardswish_backward(grad_output: Array, self: Array) -> Array:
    grad, x = compute(grad_output, self)
    inner = jnp.where(x < 3, grad * (x / 3 + 0.5), grad)
    return jnp.where(x <= -3, jnp.zeros((), grad.dtype), inner)


@lowering("aten.hardshrink.default")
def hardshrink(self: Array, lambd: Any = 0.5) -> Array:
    bound = cast(lambd, self.dtype)
    return jnp.where((self >= -bound) & (self <= bound), jnp.zeros((), self.dtype), self)


@lowering("aten.softshrink.default")
def softshrink(self: Array, lambd: Any = 0.5) -> Array:
    (x,) = compute(self)
    bound = cast(lambd, x.dtype)
    # x * 0 keeps a NaN.
    return jnp.where(x > bound, x - bound, jnp.where(x < -bound, x + bound, x * 0))


@lowering("aten.hardshrink_backward.default")
def hardshrink_backward(grad_out: Array, self: Array, lambd: Any) -> Array:
    grad, x = compute(grad_out, self)
    bound = cast(lambd, x.dtype)
    return jnp.where((x >= -bound) & (x <= bound), jnp.zeros((), grad.dtype), grad)


@lowering("aten.softshrink_backward.default")
def softshrink_backward(grad_output: Array, self: Array, lambd: Any) -> Array:
    return hardshrink_backward(grad_output, self, lambd)


# --- glu


def _halves(x: Array, dim: int) -> tuple[Array, Array]:
    size = x.shape[dim] // 2
    return lax.slice_in_dim(x, 0, size, axis=dim), lax.slice_in_dim(x, size, None, axis=dim)


@lowering("aten.glu.default")
def glu(self: Array, dim: int = -1) -> Array:
    value, gate = _halves(*compute(self), dim)
    return value * lax.logistic(gate)


@lowering("aten.glu_backward.default")
def glu_backward(grad_output: Array, self: Array, dim: int) -> Array:
    grad, x = compute(grad_output, self)
    value, gate = _halves(x, dim)
    sigmoid = lax.logistic(gate)
    parts = [grad * sigmoid, grad * value * sigmoid * (1 - sigmoid)]
    return lax.concatenate(parts, dim % x.ndim)


@lowering("aten.glu_jvp.default")
def glu_jvp(glu: Array, x: Array, dx: Array, dim: int) -> Array:
    result, x, dx = compute(glu, x, dx)
    _, gate = _halves(x, dim)
    dvalue, dgate = _halves(dx, dim)
    sigmoid = lax.logistic(gate)
    return dvalue * sigmoid + result * (1 - sigmoid) * dgate


@lowering("aten.glu_backward_jvp.default")
def glu_backward_jvp(
    grad_x: Array, grad_glu: Array, x: Array, dgrad_glu: Array, dx: Array, dim: int
) -> Array:
    grad_x, grad, x, dgrad, dx = compute(grad_x, grad_glu, x, dgrad_glu, dx)
    value, gate = _halves(x, dim)
    dvalue, dgate = _halves(dx, dim)
    sigmoid = lax.logistic(gate)
    slope = sigmoid * (1 - sigmoid)
    first = dgrad * sigmoid + grad * slope * dgate
    second = (
        dgrad * value * slope
        + grad * dvalue * slope
        + grad * value * slope * (1 - 2 * sigmoid) * dgate
    )
    return lax.concatenate([first, second], dim % x.ndim)
