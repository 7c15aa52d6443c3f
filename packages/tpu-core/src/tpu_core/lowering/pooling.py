"""Max and average pooling over fixed windows, and max unpooling.

A window of up to `_UNROLL` positions is written as that many strided slices, and its gradient as
that many dilated pads: both fuse, need no scatter, and leave out what a program does not use (the
indices of a max pool in inference). Larger windows use ``reduce_window`` and a scatter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, is_float, op_math
from tpu_core.lowering.registry import lowering

_UNROLL = 36


@dataclass(frozen=True)
class Windows:
    """Geometry of windows that slide over the last dims of an input.

    Attributes:
        lead: Shape of the dims before them.
        sizes: Input's sizes along those dims.
        counts: Number of windows along them, which covers ``ceil_mode``.
        kernel, stride, padding, dilation: As in PyTorch, one number a dim.
    """

    lead: tuple[int, ...]
    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @staticmethod
    def of(
        shape: Sequence[int],
        windowed: Sequence[int],
        rank: int,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int] = (1,),
    ) -> Windows:
        """Windows over an input of ``shape`` whose pooled result has the shape ``windowed``."""

        def per_dim(values: Sequence[int]) -> tuple[int, ...]:
            values = (values,) if isinstance(values, int) else tuple(values)
            return values * rank if len(values) == 1 else values

        kernel = per_dim(kernel)
        return Windows(
            tuple(shape[:-rank]), tuple(shape[-rank:]), tuple(windowed[-rank:]), kernel,
            per_dim(stride) if stride else kernel, per_dim(padding), per_dim(dilation),
        )  # fmt: skip

    @property
    def area(self) -> int:
        return int(np.prod(self.kernel))

    @property
    def reach(self) -> tuple[int, ...]:
        """Positions from the first window's start to the last window's end."""
        return tuple(
            s * (n - 1) + d * (k - 1) + 1
            for s, n, d, k in zip(self.stride, self.counts, self.dilation, self.kernel)
        )

    def pad(self, x: jax.Array, value: Any) -> jax.Array:
        """``x`` with its padding, exactly as long as the windows reach."""
        widths = [(p, r - n - p, 0) for p, r, n in zip(self.padding, self.reach, self.sizes)]
        return lax.pad(x, jnp.asarray(value, x.dtype), [(0, 0, 0)] * len(self.lead) + widths)

    def offsets(self) -> Iterator[tuple[int, ...]]:
        """Offsets within a window, row-major, dilation included."""
        steps = [range(0, d * k, d) for k, d in zip(self.kernel, self.dilation)]
        return itertools.product(*steps)

    def take(self, padded: jax.Array, offset: Sequence[int]) -> jax.Array:
        """The position ``offset`` of every window."""
        lead = len(self.lead)
        stops = [o + s * (n - 1) + 1 for o, s, n in zip(offset, self.stride, self.counts)]
        return lax.slice(
            padded, (0,) * lead + tuple(offset), self.lead + tuple(stops), (1,) * lead + self.stride
        )

    def give(self, values: jax.Array, offset: Sequence[int]) -> jax.Array:
        """The adjoint of `take` and of `pad`: zeros but for ``values`` at ``offset``."""
        widths = []
        for o, p, s, n, size in zip(offset, self.padding, self.stride, self.counts, self.sizes):
            widths.append((o - p, size - (o - p) - (s * (n - 1) + 1), s - 1))
        zero = jnp.zeros((), values.dtype)
        return lax.pad(values, zero, [(0, 0, 0)] * len(self.lead) + widths)

    def start(self, clipped: bool = False) -> jax.Array:
        """Flat position in the input's plane at which each window starts, as int32.

        Args:
            clipped: Step by the dilation into the input where a window starts in the padding.
        """
        total = jnp.zeros(self.counts, np.int32)
        for i, (s, p, d) in enumerate(zip(self.stride, self.padding, self.dilation)):
            position = lax.broadcasted_iota(np.int32, self.counts, i) * np.int32(s) - np.int32(p)
            if clipped and p:
                position = jnp.where(position < 0, lax.rem(position, np.int32(d)), position)
                position = jnp.where(position < 0, position + np.int32(d), position)
            total = total + position * cast(math.prod(self.sizes[i + 1 :]), np.int32)
        return total

    def flat(self, offset: Sequence[int]) -> Any:
        """Distance in the plane from a window's start to its position ``offset``."""
        distance = sum(o * math.prod(self.sizes[i + 1 :]) for i, o in enumerate(offset))
        return cast(distance, np.int32)

    def reduce(self, operands: Any, initial: Any, computation: Any) -> Any:
        """``reduce_window``; padding beyond the input reads as ``initial``."""
        lead = (1,) * len(self.lead)
        pads = [(p, r - n - p) for p, r, n in zip(self.padding, self.reach, self.sizes)]
        return lax.reduce_window(
            operands, initial, computation, lead + self.kernel, lead + self.stride,
            [(0, 0)] * len(lead) + pads, None, lead + self.dilation,
        )  # fmt: skip


def lowest(dtype: Any) -> Any:
    """Less than or equal to every value of ``dtype``."""
    if is_float(dtype):
        return jnp.asarray(-np.inf, dtype)
    return jnp.asarray(jnp.iinfo(dtype).min, dtype)


def beats(value: jax.Array, best: jax.Array) -> jax.Array:
    """Return whether ATen's max pooling moves on to ``value``: the first maximum wins, NaN over
    all.
    """
    greater = value > best
    return greater | jnp.isnan(value) if is_float(value.dtype) else greater


def max_pool(x: jax.Array, w: Windows) -> tuple[jax.Array, jax.Array]:
    """Maximum of each window and its flat position in the input's plane."""
    first = jnp.broadcast_to(w.start(clipped=True), w.lead + w.counts)
    low = lowest(x.dtype)
    if w.area <= _UNROLL:
        padded, start = w.pad(x, low), w.start()
        best, where = jnp.full(first.shape, low), first
        for offset in w.offsets():
            value = w.take(padded, offset)
            moves = beats(value, best)
            best = jnp.where(moves, value, best)
            where = jnp.where(moves, start + w.flat(offset), where)
        return best, where
    size = math.prod(w.sizes)
    positions = lax.iota(np.int32, size).reshape(w.sizes)

    def pick(a: Any, b: Any) -> Any:
        moves = beats(b[0], a[0])
        return jnp.where(moves, b[0], a[0]), jnp.where(moves, b[1], a[1])

    operands = (x, jnp.broadcast_to(positions, x.shape))
    best, where = w.reduce(operands, (low, jnp.asarray(-1, np.int32)), pick)
    return best, jnp.where(where < 0, first, where)


def scatter_planes(
    values: jax.Array, indices: jax.Array, sizes: Sequence[int], rank: int, add: bool
) -> jax.Array:
    """Put each plane of ``values`` at its flat ``indices`` in a plane of zeros of ``sizes``."""
    lead = values.shape[:-rank]
    planes, size = math.prod(lead), math.prod(sizes)
    shape = (planes, math.prod(values.shape[-rank:]))
    flat = cast(indices, np.int32).reshape(shape)
    rows = lax.broadcasted_iota(np.int32, shape, 0)
    target = jnp.zeros((planes, size), values.dtype).at[rows, flat]
    values = values.reshape(shape)
    done = target.add(values, mode="drop") if add else target.set(values, mode="drop")
    return done.reshape(*lead, *sizes)


def max_pool_backward(grad: jax.Array, indices: jax.Array, w: Windows) -> jax.Array:
    """Add each window's gradient at its maximum's position."""
    grad = cast(grad, op_math(grad.dtype))
    rank = len(w.sizes)
    if 0 in grad.shape or w.area > _UNROLL:
        return scatter_planes(grad, indices, w.sizes, rank, add=True)
    # Which of a window's positions holds the maximum; that position then gets the gradient.
    chosen = cast(indices, np.int32) - w.start()
    zero = jnp.zeros((), grad.dtype)
    parts = (w.give(jnp.where(chosen == w.flat(o), grad, zero), o) for o in w.offsets())
    total = next(parts)
    for part in parts:
        total = total + part
    return total


def _max_pool_forward(rank: int) -> Any:
    def forward(
        x: jax.Array,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
        *,
        out: Any,
    ) -> tuple[jax.Array, jax.Array]:
        w = Windows.of(x.shape, out[0].shape, rank, kernel_size, stride, padding, dilation)
        return max_pool(x, w)

    return forward


def _max_pool_gradient(rank: int) -> Any:
    def backward(
        grad: jax.Array,
        x: jax.Array,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil_mode: bool,
        indices: jax.Array,
    ) -> jax.Array:
        w = Windows.of(x.shape, grad.shape, rank, kernel_size, stride, padding, dilation)
        return max_pool_backward(grad, indices, w)

    return backward


def _window_counts(w: Windows, count_include_pad: bool, divisor: int | None) -> Any:
    """Divisor of each window's sum: a number, or an array of the windows' shape.

    ATen counts positions up to the padded input's end, never what ``ceil_mode`` reaches beyond.
    """
    if divisor is not None:
        return divisor
    per_dim = []
    for k, s, p, size, n in zip(w.kernel, w.stride, w.padding, w.sizes, w.counts):
        start = np.arange(n) * s - p
        stop = np.minimum(start + k, size + p)
        if not count_include_pad:
            start, stop = np.maximum(start, 0), np.minimum(stop, size)
        per_dim.append(stop - start)
    if all(np.all(c == c[:1]) for c in per_dim):
        return int(np.prod([c[0] if len(c) else 1 for c in per_dim]))
    # Computed by the program, not constants of it: padded arrays have them for any size.
    total = jnp.ones((), np.int32)
    for i in range(len(per_dim)):
        total = total * _counts_along(w, i, count_include_pad)
    return total


def _counts_along(w: Windows, i: int, count_include_pad: bool) -> jax.Array:
    k, s, p, size = w.kernel[i], w.stride[i], w.padding[i], w.sizes[i]
    start = lax.broadcasted_iota(np.int32, w.counts, i) * np.int32(s) - np.int32(p)
    stop = jnp.minimum(start + np.int32(k), cast(size + p, np.int32))
    if not count_include_pad:
        start, stop = jnp.maximum(start, np.int32(0)), jnp.minimum(stop, cast(size, np.int32))
    return stop - start


def _divide(x: jax.Array, count: Any) -> jax.Array:
    count = cast(count, x.dtype)
    return x / count if is_float(x.dtype) else lax.div(x, jnp.broadcast_to(count, x.shape))


def _avg_pool_forward(rank: int) -> Any:
    def forward(
        x: jax.Array,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        *,
        out: Any,
    ) -> jax.Array:
        w = Windows.of(x.shape, out[0].shape, rank, kernel_size, stride, padding)
        x = cast(x, op_math(x.dtype))
        zero = jnp.zeros((), x.dtype)
        if w.area <= _UNROLL:
            padded = w.pad(x, zero)
            total = jnp.zeros(w.lead + w.counts, x.dtype)
            for offset in w.offsets():
                total = total + w.take(padded, offset)
        else:
            total = w.reduce(x, zero, lax.add)
        return _divide(total, _window_counts(w, count_include_pad, divisor_override))

    return forward


def _avg_pool_gradient(rank: int) -> Any:
    def backward(
        grad: jax.Array,
        x: jax.Array,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> jax.Array:
        """The adjoint of a window's sum is the sum over the windows that hold a position."""
        w = Windows.of(x.shape, grad.shape, rank, kernel_size, stride, padding)
        if x.size == 0:
            return jnp.zeros_like(x)
        grad = _divide(
            cast(grad, op_math(grad.dtype)),
            _window_counts(w, count_include_pad, divisor_override),
        )
        lead = (1,) * len(w.lead)
        pads = []
        for k, s, p, size, n in zip(w.kernel, w.stride, w.padding, w.sizes, w.counts):
            low = k - 1 - p
            pads.append((low, size + k - 1 - low - (s * (n - 1) + 1)))
        return lax.reduce_window(
            grad, np.zeros((), grad.dtype), lax.add, lead + w.kernel, lead + (1,) * rank,
            [(0, 0)] * len(lead) + pads, lead + w.stride,
        )  # fmt: skip

    return backward


for _rank in (2, 3):
    lowering(f"aten.max_pool{_rank}d_with_indices.default")(_max_pool_forward(_rank))
    lowering(f"aten.max_pool{_rank}d_with_indices_backward.default")(_max_pool_gradient(_rank))
    lowering(f"aten.avg_pool{_rank}d.default")(_avg_pool_forward(_rank))
    lowering(f"aten.avg_pool{_rank}d_backward.default")(_avg_pool_gradient(_rank))


@lowering("aten.max_unpool2d.default")
def max_unpool2d(x: jax.Array, indices: jax.Array, output_size: Sequence[int]) -> jax.Array:
    return scatter_planes(x, indices, output_size, 2, add=False)


@lowering("aten.max_unpool3d.default")
def max_unpool3d(
    x: jax.Array,
    indices: jax.Array,
    output_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> jax.Array:
    return scatter_planes(x, indices, output_size, 3, add=False)
