"""Lowerings of layer, group and RMS normalisation and of renorm; batch_norm.py has the rest."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.reduction import count_of, mean_over, moments, sum_over, vector_norm
from tpu_core.lowering.registry import lowering

Gradients = tuple[jax.Array | None, ...]


def affine(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, shape: Sequence[int]
) -> jax.Array:
    """``x * weight + bias``, both optional and broadcast from ``shape``."""
    if weight is not None:
        x = x * lax.reshape(cast(weight, x.dtype), shape)
    if bias is not None:
        x = x + lax.reshape(cast(bias, x.dtype), shape)
    return x


def input_gradient(
    grad: jax.Array, normalized: jax.Array, rstd: jax.Array, axes: tuple[int, ...]
) -> jax.Array:
    """Gradient of ``(x - mean) * rstd`` with the statistics taken over ``axes``.

    ``grad`` and ``normalized`` (the forward's value) have ``x``'s shape, ``rstd`` broadcasts.
    """
    # Times the reciprocal: the quotient would be fused into the loop over all elements.
    scale = np.asarray(1 / max(count_of(grad, axes), 1), grad.dtype)
    mean_grad = sum_over(grad, axes, keepdim=True) * scale
    mean_dot = sum_over(grad * normalized, axes, keepdim=True) * scale
    return (grad - mean_grad - normalized * mean_dot) * rstd


@lowering("aten.native_layer_norm.default")
def layer_norm(
    x: jax.Array,
    normalized_shape: Sequence[int],
    weight: jax.Array | None,
    bias: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, ...]:
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    variance, mean = moments(x, axes, keepdim=True)
    rstd = lax.rsqrt(variance + cast(eps, variance.dtype))
    normalized = (cast(x, mean.dtype) - mean) * rstd
    return affine(normalized, weight, bias, normalized_shape), mean, rstd


@lowering("aten.native_layer_norm_backward.default")
def layer_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    normalized_shape: Sequence[int],
    mean: jax.Array,
    rstd: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    output_mask: Sequence[bool],
) -> Gradients:
    dtype = op_math(x.dtype)
    outer = x.ndim - len(normalized_shape)
    grad, mean, rstd = cast(grad, dtype), cast(mean, dtype), cast(rstd, dtype)
    normalized = (cast(x, dtype) - mean) * rstd
    scaled = affine(grad, weight, None, normalized_shape)
    batch = tuple(range(outer))
    return (
        input_gradient(scaled, normalized, rstd, tuple(range(outer, x.ndim)))
        if output_mask[0]
        else None,
        sum_over(grad * normalized, batch) if output_mask[1] else None,
        sum_over(grad, batch) if output_mask[2] else None,
    )


@lowering("aten._fused_rms_norm.default")
def rms_norm(
    x: jax.Array, normalized_shape: Sequence[int], weight: jax.Array | None, eps: float | None
) -> tuple[jax.Array, jax.Array]:
    """``x * rsqrt(mean(x^2) + eps)``.

    The overload has a CompositeImplicitAutograd kernel and a derivative formula: a kernel of the
    backend's own takes the formula, so that its gradient is `_fused_rms_norm_backward`.
    """
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    x = cast(x, op_math(x.dtype))
    if eps is None:
        eps = float(jnp.finfo(x.dtype).eps)
    rstd = lax.rsqrt(mean_over(x * x, axes, keepdim=True) + cast(eps, x.dtype))
    return affine(x * rstd, weight, None, normalized_shape), rstd


@lowering("aten._fused_rms_norm_backward.default")
def rms_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    normalized_shape: Sequence[int],
    rstd: jax.Array,
    weight: jax.Array | None,
    output_mask: Sequence[bool],
) -> Gradients:
    dtype = op_math(x.dtype)
    outer = x.ndim - len(normalized_shape)
    grad, rstd = cast(grad, dtype), cast(rstd, dtype)
    # Other backends save rstd without the normalised axes.
    rstd = lax.reshape(rstd, x.shape[:outer] + (1,) * len(normalized_shape))
    normalized = cast(x, dtype) * rstd
    input_grad = weight_grad = None
    if output_mask[0]:
        scaled = affine(grad, weight, None, normalized_shape)
        axes = tuple(range(outer, x.ndim))
        scale = np.asarray(1 / max(count_of(x, axes), 1), dtype)
        dot = sum_over(scaled * normalized, axes, keepdim=True) * scale
        input_grad = (scaled - normalized * dot) * rstd
    if output_mask[1] and weight is not None:
        weight_grad = sum_over(grad * normalized, tuple(range(outer)))
    return input_grad, weight_grad


def _grouped(x: jax.Array, groups: int) -> jax.Array:
    """(N, C, *) as (N, group, C / group, *)."""
    n, c, *rest = x.shape
    return lax.reshape(x, (n, groups, c // groups, *rest))


@lowering("aten.native_group_norm.default")
def group_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[jax.Array, ...]:
    grouped = _grouped(x, group)
    axes = tuple(range(2, grouped.ndim))
    variance, mean = moments(grouped, axes, keepdim=True)
    rstd = lax.rsqrt(variance + cast(eps, variance.dtype))
    normalized = (cast(grouped, mean.dtype) - mean) * rstd
    shape = (1, group, C // group) + (1,) * (x.ndim - 2)
    result = lax.reshape(affine(normalized, weight, bias, shape), x.shape)
    return result, lax.squeeze(mean, axes), lax.squeeze(rstd, axes)


@lowering("aten.native_group_norm_backward.default")
def group_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    weight: jax.Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> Gradients:
    dtype = op_math(x.dtype)
    # The gradient of an (N, C, *) input may arrive flattened to (N, C, HxW).
    grad = _grouped(lax.reshape(cast(grad, dtype), x.shape), group)
    grouped = _grouped(cast(x, dtype), group)
    axes = tuple(range(2, grouped.ndim))
    mean, rstd = (
        lax.expand_dims(lax.reshape(cast(s, dtype), (x.shape[0], group)), axes)
        for s in (mean, rstd)
    )
    normalized = (grouped - mean) * rstd
    batch = (0, *range(3, grouped.ndim))
    input_grad = weight_grad = bias_grad = None
    if output_mask[0]:
        shape = (1, group, C // group) + (1,) * (x.ndim - 2)
        scaled = affine(grad, weight, None, shape)
        input_grad = lax.reshape(input_gradient(scaled, normalized, rstd, axes), x.shape)
    if output_mask[1]:
        weight_grad = lax.reshape(sum_over(grad * normalized, batch), (C,))
    if output_mask[2]:
        bias_grad = lax.reshape(sum_over(grad, batch), (C,))
    return input_grad, weight_grad, bias_grad


@lowering("aten.renorm.default", static=("p",))
def renorm(x: jax.Array, p: float, dim: int, maxnorm: float) -> jax.Array:
    """Scale each slice along ``dim`` down to at most ``maxnorm`` (RenormKernel.cpp)."""
    full = cast(x, op_math(x.dtype))
    axes = tuple(a for a in range(x.ndim) if a != dim % x.ndim)
    size = vector_norm(full, float(p), axes, keepdim=True)
    limit = cast(maxnorm, size.dtype)
    scale = jnp.where(size > limit, limit / (size + np.asarray(1e-7, size.dtype)), 1)
    return full * scale.astype(full.dtype)


@lowering("aten._weight_norm_interface_backward.default")
def weight_norm_backward(
    grad_w: jax.Array, v: jax.Array, g: jax.Array, norms: jax.Array, dim: int
) -> tuple[jax.Array, jax.Array]:
    """Gradients of ``w = v * g / |v|``, the norm taken over every dim but ``dim``.

    ``norms`` has ``g``'s shape, in float32 where ``v`` is narrower (Salimans and Kingma, 2016, eq.
    3).
    """
    math = op_math(v.dtype)
    grad, wide, norms = cast(grad_w, math), cast(v, math), cast(norms, math)
    axes = tuple(i for i in range(v.ndim) if i != dim % v.ndim)
    dot = sum_over(grad * wide, axes, keepdim=True)
    grad_g = dot / norms
    grad_v = cast(g, math) / norms * (grad - wide * grad_g / norms)
    return cast(grad_v, v.dtype), cast(grad_g, g.dtype)
