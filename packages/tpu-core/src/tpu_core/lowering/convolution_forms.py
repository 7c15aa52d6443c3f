"""Forms of a convolution and of its transpose, by what the platform is fast at."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpu_core.array_types import Num
from tpu_core.dtypes import op_math
from tpu_core.lowering.convolution_taps import convolve_by_taps, windows_of_taps
from tpu_core.lowering.matmul import contract
from tpu_core.lowering.precision import precision_of


def _specs(rank: int) -> tuple[str, str, str]:
    """Spellings of (N, C, ...), (O, I, ...) and (I, O, ...) for ``rank`` spatial dims."""
    space = "DHW"[3 - rank :]
    return "NC" + space, "OI" + space, "IO" + space


def conv(x: Array, w: Array, **options: Any) -> Array:
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
    groups = options.get("feature_group_count", 1)
    if ways := platforms_of_taps(x, w, w.shape[2:], groups):
        by_taps = functools.partial(convolve_by_taps, **options)
        return lax.platform_dependent(x, w, **dict.fromkeys(ways, by_taps), default=whole)
    return whole(x, w)


# Positions of the kernel up to which a convolution in groups is a sum over them.
_MOST_GROUPED_TAPS = 49


def platforms_of_taps(x: Array, y: Array, kernel: Sequence[int], groups: int) -> list[str]:
    """Platforms on which a convolution in groups is a sum over the taps of its kernel.

    At more than one pass of bfloat16 libtpu unrolls such a convolution over positions: of
    [16, 24, 24, 24] with a kernel of 3x3 it takes over 90 s to compile it in 24 groups and 50 s in
    4 (0.0.42); as sums over the kernel's positions 2 and 7 s. XLA:CPU takes twice as long to run
    it, and up to 240 times for the weight gradient.

    Args:
        x, y: The operands: image and kernel, or image and gradient.
        kernel: Positions of the kernel in each spatial dim.
        groups: Number of groups.
    """
    few_taps = 0 < math.prod(kernel) <= _MOST_GROUPED_TAPS
    if groups == 1 or x.dtype != np.float32 or not (few_taps and x.size and y.size):
        return []
    return ["cpu", *["tpu"] * (precision_of(x.dtype) != lax.Precision.DEFAULT)]


def forward_convolution(
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
        conv,
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


def transposed_convolution(
    x: Num[Array, "batch channels *sizes"],
    w: Num[Array, "channels features_per_group *kernel"],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> Num[Array, "batch features_per_group*{groups} *outputs"]:
    """The transpose of `forward_convolution` with weights ``w [C_in, C_out / groups, ...]``."""
    rank = x.ndim - 2
    image, kernel, swapped = _specs(rank)
    if groups > 1:
        # (g * I, O, ...) -> (g * O, I, ...): feature groups lie in the kernel's output dim.
        by_group = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
        by_group = jnp.swapaxes(by_group, 1, 2)
        w = by_group.reshape(groups * by_group.shape[1], *by_group.shape[2:])
    w = lax.rev(w, range(2, rank + 2))
    reach = [d * (k - 1) for d, k in zip(dilation, w.shape[2:])]
    pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding)]
    if groups > 1 and set(stride) == {1}:
        return forward_convolution(x, w, stride, pads, dilation, groups)
    return conv(
        x,
        w,
        window_strides=(1,) * rank,
        padding=pads,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=(image, kernel if groups > 1 else swapped, image),
        feature_group_count=groups,
    )
