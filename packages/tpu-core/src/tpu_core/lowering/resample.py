"""Upsampling and downsampling of one to three spatial dims, and the gradients.

Every mode is separable, and along one axis a weighted sum of few inputs, so each op is one
`tpu_core.lowering.weighted_gather.WeightedGather` an axis. The tables are computed as ATen does, in
the precision that it does (aten/src/ATen/native/UpSample.h, cpu/UpSampleKernel.cpp): rounding
decides indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_core.dtypes import cast, is_float, op_math
from tpu_core.lowering.registry import lowering
from tpu_core.lowering.tables import are_inputs
from tpu_core.lowering.weighted_gather import WeightedGather, apply


def _scale(size: int, outputs: int, align_corners: bool, scale: float | None, real: Any) -> Any:
    """Input positions an output position (``area_pixel_compute_scale``)."""
    if align_corners:
        return real(size - 1) / real(outputs - 1) if outputs > 1 else real(0)
    if scale is not None and scale > 0:
        return real(1.0 / scale)
    return real(size) / real(outputs)


def _source(size: int, outputs: int, align_corners: bool, scale: float | None, real: Any) -> Any:
    """Fractional input position of each output (``area_pixel_compute_source_index``)."""
    step = _scale(size, outputs, align_corners, scale, real)
    i = np.arange(outputs, dtype=real)
    return step * i if align_corners else step * (i + real(0.5)) - real(0.5)


def nearest_map(
    size: int, outputs: int, align_corners: bool, scale: float | None, real: Any
) -> WeightedGather:
    # The scale is float32 whatever the tensor's dtype is.
    step = _scale(size, outputs, False, scale, np.float32)
    index = np.floor(np.arange(outputs, dtype=np.float32) * step)
    if outputs == size:
        index = np.arange(outputs)
    elif outputs == 2 * size:
        index = np.arange(outputs) // 2
    return WeightedGather.select(np.minimum(index, size - 1), size)


def nearest_exact_map(
    size: int, outputs: int, align_corners: bool, scale: float | None, real: Any
) -> WeightedGather:
    step = _scale(size, outputs, False, scale, np.float32)
    index = np.floor((np.arange(outputs, dtype=np.float32) + np.float32(0.5)) * step)
    return WeightedGather.select(np.minimum(index, size - 1), size)


def linear_map(
    size: int, outputs: int, align_corners: bool, scale: float | None, real: Any
) -> WeightedGather:
    source = np.maximum(_source(size, outputs, align_corners, scale, real), real(0))
    if size == outputs:  # whatever the scale
        source = np.arange(size, dtype=real)
    low = np.minimum(np.floor(source).astype(np.int64), size - 1)
    fraction = np.clip(source - low.astype(real), real(0), real(1))
    high = np.minimum(low + 1, size - 1)
    return WeightedGather(
        np.stack([low, high], 1), np.stack([real(1) - fraction, fraction], 1), size
    )


def cubic_map(
    size: int, outputs: int, align_corners: bool, scale: float | None, real: Any
) -> WeightedGather:
    source = _source(size, outputs, align_corners, scale, real)
    low = np.minimum(np.floor(source).astype(np.int64), size - 1)
    t = np.clip(source - low.astype(real), real(0), real(1))
    a = real(-0.75)
    weights = [_cubic_far(t + real(1), a), _cubic_near(t, a)]
    weights += [_cubic_near(real(1) - t, a), _cubic_far(real(2) - t, a)]
    index = np.clip(low[:, None] + np.arange(-1, 3)[None], 0, size - 1)
    return WeightedGather(index, np.stack(weights, 1), size)


def _cubic_near(x: Any, a: Any) -> Any:
    return ((a + 2) * x - (a + 3)) * x * x + 1


def _cubic_far(x: Any, a: Any) -> Any:
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def _triangle(x: Any) -> Any:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: Any) -> Any:
    """Pillow's kernel: ``a`` is -0.5 here and -0.75 without antialiasing."""
    x, a = np.abs(x), x.dtype.type(-0.5)
    return np.where(x < 1, _cubic_near(x, a), np.where(x < 2, _cubic_far(x, a), 0))


def _lanczos(x: Any) -> Any:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _antialiased(kernel: Callable[[Any], Any], taps: int) -> Callable[..., WeightedGather]:
    """Tables of a kernel that widens with the downsampling factor (``_compute_weights_aa``)."""

    def table(
        size: int, outputs: int, align_corners: bool, scale: float | None, real: Any
    ) -> WeightedGather:
        step = _scale(size, outputs, align_corners, scale, real)
        support = real(taps * 0.5) * max(step, real(1))
        center = step * (np.arange(outputs, dtype=real) + real(0.5))
        start = np.maximum((center - support + real(0.5)).astype(np.int64), 0)
        stop = np.minimum((center + support + real(0.5)).astype(np.int64), size)
        width = max(int((stop - start).max(initial=1)), 1)
        index = start[:, None] + np.arange(width)[None]
        inverse = real(1) / step if step >= 1 else real(1)
        weight = kernel((index.astype(real) - center[:, None] + real(0.5)) * inverse)
        weight = np.where(index < stop[:, None], weight, 0).astype(real)
        total = weight.sum(1, keepdims=True)
        weight = weight / np.where(total == 0, real(1), total)
        index = np.where(weight != 0, index, start[:, None]).clip(0, size - 1)
        return WeightedGather(index, weight, size, terms_vary=True)

    return table


def _maps(
    table: Callable[..., WeightedGather],
    sizes: Sequence[int],
    outputs: Sequence[int],
    align_corners: bool,
    scales: Sequence[float | None],
    dtype: Any,
) -> list[WeightedGather]:
    real = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    made = []
    for size, n, scale in zip(sizes, outputs, scales):
        m = table(size, n, align_corners, scale, real)
        # A given scale is a factor of all sizes: each input is repeated as often.
        repeats = m.index.shape[1] == 1 and scale is not None and scale >= 1 and scale % 1 == 0
        made.append(replace(m, alike=are_inputs() and not repeats))
    return made


def resample(x: jax.Array, maps: Sequence[WeightedGather]) -> jax.Array:
    """Apply one map an axis to the last axes, the innermost first as ATen does."""
    lead = x.ndim - len(maps)
    selects = all(m.index.shape[1] == 1 for m in maps)
    dtype = x.dtype
    if not selects:
        x = cast(x, op_math(dtype) if is_float(dtype) else np.float32)
    for i in reversed(range(len(maps))):
        x = apply(x, lead + i, maps[i])
    if not selects and not is_float(dtype):  # uint8 images
        info = jnp.iinfo(dtype)
        x = jnp.clip(jnp.floor(x + np.float32(0.5)), np.float32(info.min), np.float32(info.max))
    return x


def _gradient(grad: jax.Array, maps: Sequence[WeightedGather]) -> jax.Array:
    lead = grad.ndim - len(maps)
    grad = cast(grad, op_math(grad.dtype))
    for i, m in enumerate(maps):
        grad = apply(grad, lead + i, m.transpose())
    return grad


def _register(
    op: str, rank: int, table: Callable[..., WeightedGather], aligned: bool, backward: bool = True
) -> None:
    """Register an op and its gradient.

    Args:
        op: Overload packet, such as ``"aten.upsample_linear1d"``.
        rank: Number of resampled dimensions.
        table: Makes the map of one axis.
        aligned: Whether the schema has ``align_corners``.
        backward: Whether PyTorch has the gradient as an op.
    """

    def forward(x: jax.Array, output_size: Sequence[int], *rest: Any, **named: Any) -> jax.Array:
        align_corners, scales = _options(len(output_size), aligned, rest, named)
        sizes = x.shape[2:]
        return resample(
            x, _maps(table, sizes, output_size, align_corners, scales, op_math(x.dtype))
        )

    def gradient(
        grad: jax.Array,
        output_size: Sequence[int],
        input_size: Sequence[int],
        *rest: Any,
        **named: Any,
    ) -> jax.Array:
        align_corners, scales = _options(len(output_size), aligned, rest, named)
        dtype = op_math(grad.dtype)
        return _gradient(
            grad, _maps(table, input_size[2:], output_size, align_corners, scales, dtype)
        )

    static = _scale_names(rank)
    lowering(f"{op}.default", static=static)(forward)
    if backward:
        lowering(f"{op}_backward.default", static=static)(gradient)


def _scale_names(rank: int) -> tuple[str, ...]:
    """Arguments of the schema that are scales, outermost dim first."""
    return ("scales",) if rank == 1 else ("scales_d", "scales_h", "scales_w")[3 - rank :]


def _options(
    rank: int, aligned: bool, rest: Sequence[Any], named: dict[str, Any]
) -> tuple[bool, list[float | None]]:
    """``align_corners`` and the scales, outermost dim first, from what follows the sizes."""
    names = ["align_corners"] * aligned + [*_scale_names(rank)]
    given = dict(zip(names, rest)) | named
    return bool(given.pop("align_corners", False)), [given.get(n) for n in names[aligned:]]


for _rank in (1, 2, 3):
    _register(f"aten.upsample_nearest{_rank}d", _rank, nearest_map, aligned=False)
    _register(f"aten._upsample_nearest_exact{_rank}d", _rank, nearest_exact_map, aligned=False)
_register("aten.upsample_linear1d", 1, linear_map, aligned=True)
_register("aten.upsample_bilinear2d", 2, linear_map, aligned=True)
_register("aten.upsample_trilinear3d", 3, linear_map, aligned=True)
_register("aten.upsample_bicubic2d", 2, cubic_map, aligned=True)
_register("aten._upsample_bilinear2d_aa", 2, _antialiased(_triangle, 2), aligned=True)
_register("aten._upsample_bicubic2d_aa", 2, _antialiased(_cubic, 4), aligned=True)
_register("aten._upsample_lanczos2d_aa", 2, _antialiased(_lanczos, 6), aligned=True, backward=False)
