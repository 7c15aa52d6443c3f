"""Convolutions as sums over the positions of their kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpu_core.array_types import Num
from tpu_core.dtypes import op_math
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
    groups = feature_group_count
    features, channels, *kernel = w.shape
    w = w.reshape(groups, features // groups, channels, *kernel)
    inside = lhs_dilation or (1,) * len(kernel)
    each = zip(x.shape[2:], kernel, window_strides, padding, rhs_dilation, inside)
    dims = [_Dim(*dim) for dim in each]
    x = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *(d.room() for d in dims)])
    x = _by_group(x, groups)
    steps = (1, 1, *(d.step for d in dims), 1)
    shape = (groups, x.shape[1], *(d.count for d in dims), features // groups)
    parts = []
    for phases in itertools.product(*(range(d.inside) for d in dims)):
        total: Any = None
        for tap in itertools.product(*map(_Dim.taps, dims, phases)):
            starts = [d.start(phase, t) for d, phase, t in zip(dims, phases, tap)]
            ends = [start + d.step * (d.count - 1) + 1 for d, start in zip(dims, starts)]
            window = lax.slice(x, (0, 0, *starts, 0), (*x.shape[:2], *ends, channels), steps)
            rows = window.reshape(groups, -1, channels)
            term = contract(rows, w[(..., *tap)], (((2,), (2,)), ((0,), (0,))))
            total = term if total is None else total + term
        none = total is None  # the dilation is larger than the kernel
        parts.append(jnp.zeros(shape, op_math(x.dtype)) if none else total.reshape(shape))
    return _interleaved(parts, dims)


class _Dim:
    """A spatial dim of a convolution by taps.

    The outputs of a dilated image are computed in phases: those that read the same taps, as the
    others meet the holes between the image's positions.

    Args:
        size: Positions of the image.
        kernel: Those of the kernel.
        stride: Of the windows; 1 where the image is dilated.
        padding: Low and high, of the dilated image.
        dilation: Of the kernel.
        inside: Of the image: the number of phases.
    """

    def __init__(
        self,
        size: int,
        kernel: int,
        stride: int,
        padding: tuple[int, int],
        dilation: int,
        inside: int,
    ) -> None:
        assert stride == 1 or inside == 1  # PyTorch has no convolution with both
        self.size, self.kernel, self.step = size, kernel, stride
        self.low, self.dilation, self.inside = padding[0], dilation, inside
        whole = (size - 1) * inside + 1 + sum(padding)
        self.outputs = (whole - dilation * (kernel - 1) - 1) // stride + 1
        self.count = -(-self.outputs // inside)  # of a phase

    def taps(self, phase: int) -> list[int]:
        """The positions of the kernel that a phase reads."""
        return [t for t in range(self.kernel) if not self._offset(phase, t) % self.inside]

    def start(self, phase: int, tap: int) -> int:
        """The position of the image, with its room, that a phase's first output reads."""
        return self._offset(phase, tap) // self.inside + self.room()[0]

    def room(self) -> tuple[int, int, int]:
        """Padding of the image, as `lax.pad` takes it."""
        phases = range(self.inside)
        starts = [self._offset(p, t) // self.inside for p in phases for t in self.taps(p)]
        last = max(starts) + self.step * (self.count - 1) + 1
        return max(0, -min(starts)), max(0, last - self.size), 0

    def _offset(self, phase: int, tap: int) -> int:
        return phase + tap * self.dilation - self.low


def _interleaved(
    parts: Sequence[Num[Array, "groups batch *counts features"]], dims: Sequence[_Dim]
) -> Num[Array, "batch groups*features *outputs"]:
    """The outputs of all phases, in their places."""
    rank = len(dims)
    groups, batch, *counts, features = parts[0].shape
    x = lax.concatenate([p[None] for p in parts], 0)
    x = x.reshape(*(d.inside for d in dims), *parts[0].shape)
    order = [n for i in range(rank) for n in (rank + 2 + i, i)]
    x = lax.transpose(x, (rank + 1, rank, 2 * rank + 2, *order))
    sizes = (n * d.inside for n, d in zip(counts, dims))
    x = x.reshape(batch, groups * features, *sizes)
    return lax.slice(x, (0,) * x.ndim, (*x.shape[:2], *(d.outputs for d in dims)))


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
