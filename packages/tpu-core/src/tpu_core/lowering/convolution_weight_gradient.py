"""Forms of the gradient of a convolution's kernel, by what the platform is fast at."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpu_core.array_types import Num
from tpu_core.lowering.convolution_forms import conv, platforms_of_taps
from tpu_core.lowering.convolution_taps import (
    grouped_weight_gradient,
    padding_of_windows,
    windows_of_taps,
)
from tpu_core.lowering.matmul import contract, moved

# Where a weight gradient on a CPU is a sum of products: positions of the kernel, and channels.
_MOST_TAPS = 9
_FEWEST_CHANNELS = 16


def weight_gradient(
    x: Num[Array, "batch channels *sizes"],
    grad: Num[Array, "batch features *outputs"],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Num[Array, "features channels//{groups} *kernel"]:
    """Gradient of `forward_convolution`'s kernel."""
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
    if ways := platforms_of_taps(x, grad, kernel_size, groups):
        in_groups = functools.partial(grouped_weight_gradient, **geometry, groups=groups)
        forms = dict.fromkeys(ways, in_groups)
        if groups == x.shape[1] == grad.shape[1]:
            del forms["cpu"]  # XLA:CPU has a loop for channels by themselves
        if forms:
            return lax.platform_dependent(x, grad, **forms, default=correlation)
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
    pads = padding_of_windows(x.shape[1:-1], spans, kernel_size, padding, dilation)
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
    return conv(
        x,
        grad,
        window_strides=dilation,
        padding=pads,
        rhs_dilation=stride,
        dimension_numbers=("CN" + space, "IO" + space, "CN" + space),
        batch_group_count=groups,
    )
