"""Convolutions of one to three spatial dims and their gradients.

Each result is one ``conv_general_dilated`` whose dimension numbers say where batch and features
lie (`convolution_forms`, `convolution_weight_gradient`), or products where a platform is slow at
it. The three convolutions of a training step are each other's transposes:

* a convolution's input gradient is the transposed convolution of the output's gradient;
* a transposed convolution's input gradient is the convolution of the output's gradient;
* the weight gradient correlates the larger image with the smaller, for both (roles swapped).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.convolution_forms import forward_convolution, transposed_convolution
from tpu_core.lowering.convolution_weight_gradient import weight_gradient
from tpu_core.lowering.registry import lowering


def _per_dim(values: Sequence[int], rank: int) -> tuple[int, ...]:
    """PyTorch lets one number stand for all dims."""
    return tuple(values) * rank if len(values) == 1 else tuple(values)


@lowering("aten.convolution.default", "aten.convolution_overrideable.default")
def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    rank = weight.ndim - 2
    unbatched = x.ndim == rank + 1
    if unbatched:
        x = x[None]
    stride, padding, dilation = (_per_dim(v, rank) for v in (stride, padding, dilation))
    if transposed:
        extra = _per_dim(output_padding, rank)
        y = transposed_convolution(x, weight, stride, padding, dilation, extra, groups)
    else:
        y = forward_convolution(x, weight, stride, [(p, p) for p in padding], dilation, groups)
    if bias is not None:
        y = y + cast(bias, y.dtype).reshape(-1, *(1,) * rank)
    return y[0] if unbatched else y


def _gradients(
    grad: Array,
    x: Array,
    weight: Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    rank = weight.ndim - 2
    if x.ndim == rank + 1:
        grad_x, grad_weight, grad_bias = _gradients(
            grad[None], x[None], weight, stride, padding, dilation, transposed, groups, output_mask
        )
        return (None if grad_x is None else grad_x[0]), grad_weight, grad_bias
    stride, padding, dilation = (_per_dim(v, rank) for v in (stride, padding, dilation))
    kernel = weight.shape[2:]
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        if transposed:
            # output_padding may hold a whole further window: crop to the input's positions.
            pads = [
                (p, s * (n - 1) + d * (k - 1) + 1 - g - p)
                for p, s, n, d, k, g in zip(
                    padding, stride, x.shape[2:], dilation, kernel, grad.shape[2:]
                )
            ]
            grad_x = forward_convolution(grad, weight, stride, pads, dilation, groups)
        else:
            # Input positions that the last window does not reach, up to stride - 1 of them.
            rest = [
                n - (s * (g - 1) - 2 * p + d * (k - 1) + 1)
                for n, s, g, p, d, k in zip(
                    x.shape[2:], stride, grad.shape[2:], padding, dilation, kernel
                )
            ]
            grad_x = transposed_convolution(grad, weight, stride, padding, dilation, rest, groups)
    if output_mask[1]:
        image, window = (grad, x) if transposed else (x, grad)
        grad_weight = weight_gradient(image, window, kernel, stride, padding, dilation, groups)
    if output_mask[2]:
        lead = (0, *range(2, grad.ndim))
        grad_bias = jnp.sum(cast(grad, op_math(grad.dtype)), axis=lead)
    return grad_x, grad_weight, grad_bias


@lowering("aten.convolution_backward.default")
def convolution_backward(
    grad: Array,
    x: Array,
    weight: Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    return _gradients(grad, x, weight, stride, padding, dilation, transposed, groups, output_mask)


@lowering("aten.convolution_backward_overrideable.default")
def convolution_backward_overrideable(
    grad: Array,
    x: Array,
    weight: Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    return _gradients(grad, x, weight, stride, padding, dilation, transposed, groups, output_mask)
