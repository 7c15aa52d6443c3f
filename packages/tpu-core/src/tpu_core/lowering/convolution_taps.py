"""Convolutions as sums over the positions of their kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax import Array, lax

from tpu_core.array_types import Num
from tpu_core.lowering.matmul import contract


def windows_of_taps(
    x: Num[Array, "*dims"],
    axis: int,
    kernel: Sequence[int],
    spans: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Iterator[tuple[tuple[int, ...], Num[Array, "*dims"]]]:
    """Each position of a kernel, and the window of a padded image that it reads.

    Args:
        x: The image.
        axis: Its first spatial dim; the others follow.
        kernel: Positions of the kernel in each spatial dim.
        spans: Length of a window in each, before it is strided.
        stride, dilation: Of the convolution.
    """
    before, behind = x.shape[:axis], x.shape[axis + len(kernel) :]
    strides = (*(1,) * axis, *stride, *(1,) * len(behind))
    for tap in itertools.product(*map(range, kernel)):
        starts = [t * d for t, d in zip(tap, dilation)]
        ends = [start + span for start, span in zip(starts, spans)]
        low = (*(0,) * axis, *starts, *(0,) * len(behind))
        yield tap, lax.slice(x, low, (*before, *ends, *behind), strides)


def padding_of_windows(
    sizes: Sequence[int],
    spans: Sequence[int],
    kernel: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[tuple[int, int, int]]:
    """Padding of an image of ``sizes`` by which each tap's window of ``spans`` lies inside."""
    return [
        (p, d * (k - 1) + span - p - have, 0)
        for p, d, k, span, have in zip(padding, dilation, kernel, spans, sizes)
    ]


def convolve_by_taps(
    x: Num[Array, "batch channels *sizes"],
    w: Num[Array, "*dims"],
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    rhs_dilation: Sequence[int],
    dimension_numbers: tuple[str, str, str],
    feature_group_count: int = 1,
    lhs_dilation: Sequence[int] | None = None,
) -> Num[Array, "batch features *outputs"]:
    """`lax.conv_general_dilated` as a sum of matrix products, one for each position of the kernel.

    Args:
        x: Image, batch and channels before the spatial dims.
        w: Kernel, its features and channels per group in the order of the dimension numbers.
        window_strides: As those below, of `lax.conv_general_dilated`.
        padding: Low and high padding of each spatial dim; may be negative.
        rhs_dilation: Dilation of the kernel.
        dimension_numbers: ``("NCHW", "OIHW", "NCHW")``, or ``"IOHW"`` in the middle.
        feature_group_count: Groups of channels.
        lhs_dilation: Dilation of the image, 1 by default.
    """
    if dimension_numbers[1].startswith("IO"):
        w = w.swapaxes(0, 1)
    rank, groups = x.ndim - 2, feature_group_count
    zero = np.zeros((), x.dtype)
    inside = lhs_dilation or (1,) * rank
    edges = [(low, high, n - 1) for (low, high), n in zip(padding, inside)]
    x = lax.pad(x, zero, [(0, 0, 0), (0, 0, 0), *edges])
    batch, _, *sizes = x.shape
    features, channels, *kernel = w.shape
    x = _by_group(x, groups)
    w = w.reshape(groups, features // groups, channels, *kernel)
    spans = [n - d * (k - 1) for n, d, k in zip(sizes, rhs_dilation, kernel)]
    outputs = [(span - 1) // s + 1 for span, s in zip(spans, window_strides)]
    total: Any = None
    for tap, window in windows_of_taps(x, 2, kernel, spans, window_strides, rhs_dilation):
        rows = window.reshape(groups, -1, channels)
        term = contract(rows, w[(..., *tap)], (((2,), (2,)), ((0,), (0,))))
        total = term if total is None else total + term
    total = total.reshape(groups, batch, *outputs, features // groups)
    total = lax.transpose(total, (1, 0, rank + 2, *range(2, rank + 2)))
    return total.reshape(batch, features, *outputs)


def _by_group(x: Num[Array, "batch channels *sizes"], groups: int) -> Num[Array, "*dims"]:
    """``x`` as ``[groups, batch, *sizes, channels of a group]``."""
    x = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
    x = lax.transpose(x, (1, 0, *range(3, x.ndim), 2))
    # Moved once, not in the loop over the taps.
    return lax.optimization_barrier(x)


def grouped_weight_gradient(
    x: Num[Array, "batch channels *sizes"],
    grad: Num[Array, "batch features *outputs"],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Num[Array, "features channels//{groups} *kernel"]:
    """A weight gradient in groups: matrix products, one for each position of the kernel."""
    features, *outputs = grad.shape[1:]
    spans = [s * (n - 1) + 1 for s, n in zip(stride, outputs)]
    pads = padding_of_windows(x.shape[2:], spans, kernel_size, padding, dilation)
    x = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *pads])
    x = _by_group(x, groups)
    rows = _by_group(grad, groups).reshape(groups, -1, features // groups)
    products = []
    for _, window in windows_of_taps(x, 2, kernel_size, spans, stride, dilation):
        window = window.reshape(groups, rows.shape[1], -1)
        products.append(contract(rows, window, (((1,), (1,)), ((0,), (0,)))))
    by_tap = lax.concatenate([p[..., None] for p in products], 3)
    return by_tap.reshape(features, -1, *kernel_size)
