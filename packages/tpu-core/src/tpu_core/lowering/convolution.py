"""Convolutions of one to three spatial dims and their gradients.

Each result is one ``conv_general_dilated`` whose dimension numbers say where batch and features
lie; only the grouped transposed kernel is rearranged first, and on a CPU the weight gradient is a
sum of products (`_weight_gradient_by_taps`). The three convolutions of a training
step are each other's transposes:

* a convolution's input gradient is the transposed convolution of the output's gradient;
* a transposed convolution's input gradient is the convolution of the output's gradient;
* the weight gradient correlates the larger image with the smaller, for both (roles swapped).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpu_core.array_types import Num
from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.convolution_taps import convolve_by_taps, windows_of_taps
from tpu_core.lowering.matmul import contract, moved
from tpu_core.lowering.precision import precision_of
from tpu_core.lowering.registry import lowering


def _specs(rank: int) -> tuple[str, str, str]:
    """Spellings of (N, C, ...), (O, I, ...) and (I, O, ...) for ``rank`` spatial dims."""
    space = "DHW"[3 - rank :]
    return "NC" + space, "OI" + space, "IO" + space


def _per_dim(values: Sequence[int], rank: int) -> tuple[int, ...]:
    """PyTorch lets one number stand for all dims."""
    return tuple(values) * rank if len(values) == 1 else tuple(values)


def _conv(x: Array, w: Array, **options: Any) -> Array:
    whole = functools.partial(
        lax.conv_general_dilated,
        precision=precision_of(x.dtype),
        preferred_element_type=op_math(x.dtype),
        **options,
    )
    if jnp.issubdtype(x.dtype, jnp.integer) and x.size and w.size:
        # cuDNN has no convolution of integers, and PyTorch no gradient of one.
        by_taps = functools.partial(convolve_by_taps, **options)
        return lax.platform_dependent(x, w, cuda=by_taps, default=whole)
    return whole(x, w)


def _forward(
    x: Num[Array, "batch channels *sizes"],
    w: Num[Array, "features channels_per_group *kernel"],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
) -> Num[Array, "batch features *outputs"]:
    """The convolution with padding ``(low, high)`` a dim, which XLA lets be negative."""
    image, kernel, _ = _specs(x.ndim - 2)
    whole = functools.partial(
        _conv,
        window_strides=stride,
        padding=padding,
        rhs_dilation=dilation,
        dimension_numbers=(image, kernel, image),
        feature_group_count=groups,
    )
    if groups == 1 and _is_product(w, padding) and x.dtype == np.float32 and x.size:
        product = functools.partial(_by_product, stride=stride)
        return lax.platform_dependent(x, w, cpu=product, default=whole)
    each_alone = 1 < groups == x.shape[1] == w.shape[0]
    few_taps = math.prod(w.shape[2:]) <= _MOST_DEPTHWISE_TAPS
    if each_alone and few_taps and x.dtype == np.float32 and x.size and min(map(min, padding)) >= 0:
        by_taps = functools.partial(
            _depthwise_by_taps, stride=stride, padding=padding, dilation=dilation
        )
        return lax.platform_dependent(x, w, cpu=by_taps, default=whole)
    return whole(x, w)


def _is_product(
    w: Num[Array, "features channels_per_group *kernel"], padding: Sequence[tuple[int, int]]
) -> bool:
    return math.prod(w.shape[2:]) == 1 and not any(map(any, padding))


def _by_product(
    x: Num[Array, "batch channels *sizes"],
    w: Num[Array, "features channels *kernel"],
    stride: Sequence[int],
) -> Num[Array, "batch features *outputs"]:
    """A convolution with a kernel of one position on a CPU: a matrix product.

    XLA:CPU would move the kernel to where its convolutions have the features, slowly.
    """
    last = x.ndim - 1
    x = lax.slice(x, (0,) * x.ndim, x.shape, (1, 1, *stride))
    x = lax.transpose(x, (0, *range(2, x.ndim), 1))
    y = contract(x, w.reshape(w.shape[:2]), (((last,), (1,)), ((), ())))
    return lax.transpose(y, (0, last, *range(1, last)))


# Positions of the kernel up to which a depthwise convolution on a CPU is a sum over them.
_MOST_DEPTHWISE_TAPS = 25


def _depthwise_by_taps(
    x: Num[Array, "batch channels *sizes"],
    w: Num[Array, "channels 1 *kernel"],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> Num[Array, "batch channels *outputs"]:
    """A convolution of each channel by itself on a CPU: shifted images, weighed and added.

    XLA:CPU runs one as so many convolutions of one channel, at a tenth of the speed.
    """
    rank = x.ndim - 2
    last = rank + 1
    # Where convolutions before and after it have them, so that nothing is moved.
    x = lax.transpose(x, (0, *range(2, rank + 2), 1))
    x = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), *((a, b, 0) for a, b in padding), (0, 0, 0)])
    # A pad in the loop over the taps would ask at each of them whether it is inside.
    x = lax.optimization_barrier(x)
    reach = [d * (k - 1) for d, k in zip(dilation, w.shape[2:])]
    spans = [n - r for n, r in zip(x.shape[1:last], reach)]
    total: Any = None
    for tap, window in windows_of_taps(x, 1, w.shape[2:], spans, stride, dilation):
        term = window * w[(slice(None), 0, *tap)]
        total = term if total is None else total + term
    return lax.transpose(total, (0, last, *range(1, last)))


def _transposed(
    x: Num[Array, "batch channels *sizes"],
    w: Num[Array, "channels features_per_group *kernel"],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> Num[Array, "batch features_per_group*{groups} *outputs"]:
    """The transpose of `_forward` with weights ``w [C_in, C_out / groups, ...]``."""
    rank = x.ndim - 2
    image, kernel, swapped = _specs(rank)
    if groups > 1:
        # (g * I, O, ...) -> (g * O, I, ...): feature groups lie in the kernel's output dim.
        by_group = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
        by_group = jnp.swapaxes(by_group, 1, 2)
        w = by_group.reshape(groups * by_group.shape[1], *by_group.shape[2:])
    w = lax.rev(w, range(2, rank + 2))
    reach = [d * (k - 1) for d, k in zip(dilation, w.shape[2:])]
    return _conv(
        x,
        w,
        window_strides=(1,) * rank,
        padding=[(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding)],
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=(image, kernel if groups > 1 else swapped, image),
        feature_group_count=groups,
    )


# Where a weight gradient on a CPU is a sum of products: positions of the kernel, and channels.
_MOST_TAPS = 9
_FEWEST_CHANNELS = 16


def _weight_gradient(
    x: Num[Array, "batch channels *sizes"],
    grad: Num[Array, "batch features *outputs"],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Num[Array, "features channels//{groups} *kernel"]:
    """Gradient of `_forward`'s kernel."""
    geometry = {
        "kernel_size": tuple(kernel_size),
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
    }
    correlation = functools.partial(_weight_gradient_by_correlation, **geometry, groups=groups)
    few_taps = math.prod(kernel_size) <= _MOST_TAPS
    wide = min(x.shape[1], grad.shape[1]) >= _FEWEST_CHANNELS
    if groups == 1 and x.dtype == np.float32 and x.size and grad.size:
        if few_taps and wide:
            by_taps = functools.partial(_weight_gradient_by_taps, **geometry)
            return lax.platform_dependent(x, grad, cpu=by_taps, default=correlation)
        if x.shape[1] < _TPU_CHANNELS:
            on_tpu = functools.partial(_of_few_channels, gradient=correlation)
            return lax.platform_dependent(x, grad, tpu=on_tpu, default=correlation)
    return correlation(x, grad)


def _weight_gradient_by_taps(
    x: Num[Array, "batch channels *sizes"],
    grad: Num[Array, "batch features *outputs"],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Num[Array, "features channels *kernel"]:
    """The gradient on a CPU: one matrix product for each position of the kernel.

    XLA:CPU runs the correlation, whose window is as large as the image, at a third to a half of
    the speed that it runs matrix products.
    """
    rank = x.ndim - 2
    channels_last = (0, *range(2, rank + 2), 1)
    x, grad = lax.transpose(x, channels_last), lax.transpose(grad, channels_last)
    # Together, so that nothing is padded long before its use and kept until then.
    x, grad = lax.optimization_barrier((x, grad))
    _, *size, outputs = grad.shape
    spans = [s * (g - 1) + 1 for s, g in zip(stride, size)]
    pads = [
        (p, d * (k - 1) + span - p - have, 0)
        for p, d, k, span, have in zip(padding, dilation, kernel_size, spans, x.shape[1:-1])
    ]
    x = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
    rows = moved(grad.reshape(-1, outputs))
    products = []
    for _, window in windows_of_taps(x, 1, kernel_size, spans, stride, dilation):
        products.append(contract(rows, window.reshape(rows.shape[1], -1), (((1,), (0,)), ((), ()))))
    # The barrier keeps the products from being written one number in `taps`, which is slow.
    by_tap = lax.optimization_barrier(jnp.stack(products))
    return lax.transpose(by_tap, (1, 2, 0)).reshape(outputs, -1, *kernel_size)


# Channels that a TPU's registers hold side by side.
_TPU_CHANNELS = 8


def _of_few_channels(
    x: Num[Array, "batch channels *sizes"],
    grad: Num[Array, "batch features *outputs"],
    gradient: Callable[[Array, Array], Array],
) -> Num[Array, "features channels *kernel"]:
    """The weight gradient of a first layer on a TPU: channels of zeros beside those of the image.

    libtpu (0.0.40 to 0.0.52) unrolls a float32 correlation of fewer channels at full precision
    over positions and takes minutes to compile it: of [32, 3, 32, 32] with 16 features over 250 s,
    with eight channels 5 s.
    """
    channels = x.shape[1]
    widths = [(0, 0, 0)] * x.ndim
    widths[1] = (0, _TPU_CHANNELS - channels, 0)
    # The barriers keep XLA from taking the zeros out again.
    x = lax.optimization_barrier(lax.pad(x, np.zeros((), x.dtype), widths))
    whole = lax.optimization_barrier(gradient(x, grad))
    return lax.slice_in_dim(whole, 0, channels, axis=1)


def _weight_gradient_by_correlation(
    x: Num[Array, "batch channels *sizes"],
    grad: Num[Array, "batch features *outputs"],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Num[Array, "features channels//{groups} *kernel"]:
    """Batch and features trade places in a dilated correlation."""
    rank = x.ndim - 2
    space = "DHW"[3 - rank :]
    # Correlating with the (strided) gradient must give exactly kernel_size positions.
    pads = [
        (p, d * (k - 1) + s * (g - 1) + 1 - n - p)
        for p, d, k, s, g, n in zip(
            padding, dilation, kernel_size, stride, grad.shape[2:], x.shape[2:]
        )
    ]
    return _conv(
        x,
        grad,
        window_strides=dilation,
        padding=pads,
        rhs_dilation=stride,
        dimension_numbers=("CN" + space, "IO" + space, "CN" + space),
        batch_group_count=groups,
    )


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
        y = _transposed(x, weight, stride, padding, dilation, extra, groups)
    else:
        y = _forward(x, weight, stride, [(p, p) for p in padding], dilation, groups)
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
            grad_x = _forward(grad, weight, stride, pads, dilation, groups)
        else:
            # Input positions that the last window does not reach, up to stride - 1 of them.
            rest = [
                n - (s * (g - 1) - 2 * p + d * (k - 1) + 1)
                for n, s, g, p, d, k in zip(
                    x.shape[2:], stride, grad.shape[2:], padding, dilation, kernel
                )
            ]
            grad_x = _transposed(grad, weight, stride, padding, dilation, rest, groups)
    if output_mask[1]:
        image, window = (grad, x) if transposed else (x, grad)
        grad_weight = _weight_gradient(image, window, kernel, stride, padding, dilation, groups)
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
