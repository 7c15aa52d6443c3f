"""Sampling of images and volumes at given points (aten/src/ATen/native/GridSampler.h).

Points outside the input never fail: they read zeros, the border or a reflection. The gradients are
the transposes of the forward pass, which JAX derives; clipping is written so that its gradient is
ATen's (0 at and beyond the border).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpu_core.array_types import Float
from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.registry import lowering

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _unnormalize(x: Array, size: int, align_corners: bool) -> Array:
    if align_corners:
        return (x + 1) / 2 * (size - 1)
    return ((x + 1) * size - 1) / 2


def _clip(x: Array, size: int) -> Array:
    x = jnp.where(x <= 0, jnp.zeros((), x.dtype), x)
    return jnp.where(x >= size - 1, jnp.asarray(size - 1, x.dtype), x)


def _reflect(x: Array, size: int, align_corners: bool) -> Array:
    low, high = (0, 2 * (size - 1)) if align_corners else (-1, 2 * size - 1)
    if low == high:
        return jnp.zeros_like(x)
    start = jnp.asarray(low / 2, x.dtype)
    span = jnp.asarray((high - low) / 2, x.dtype)
    x = x - start
    x = jnp.where(x < 0, -x, x)
    extra = lax.rem(x, jnp.broadcast_to(span, x.shape))
    odd = lax.rem(jnp.floor(x / span), jnp.full(x.shape, 2, x.dtype)) != 0
    return jnp.where(odd, span - extra, extra) + start


def _inside(x: Array, size: int, padding: int, align_corners: bool) -> Array:
    """A coordinate moved into the input, as the padding mode says."""
    if padding == _REFLECTION:
        x = _reflect(x, size, align_corners)
    if padding in (_BORDER, _REFLECTION):
        x = _clip(x, size)
    return x


def _read(
    planes: Float[Array, "batch channels positions"],
    corner: Sequence[Float[Array, "batch points"]],
    sizes: Sequence[int],
) -> Float[Array, "batch channels points"]:
    """Values at whole coordinates, an array a dim; 0 outside the input."""
    flat = jnp.zeros((), np.int32)
    valid = jnp.ones((), np.bool_)
    for x, size in zip(corner, sizes):
        valid = valid & (x >= 0) & (x <= size - 1)
        index = jnp.where((x >= 0) & (x <= size - 1), x, jnp.zeros((), x.dtype)).astype(np.int32)
        flat = flat * cast(size, np.int32) + index
    take = jax.vmap(lambda plane, index: jnp.take(plane, index, axis=1, mode="clip"))
    values = take(planes, flat)
    return jnp.where(valid[:, None, :], values, jnp.zeros((), planes.dtype))


def _cubic_weights(t: Array) -> list[Array]:
    a = -0.75

    def near(x: Array) -> Array:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Array) -> Array:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _sample(
    x: Float[Array, "batch channels *sizes"],
    grid: Float[Array, "batch *points dims"],
    mode: int,
    padding: int,
    align_corners: bool,
) -> Float[Array, "batch channels *points"]:
    rank = x.ndim - 2
    sizes, batch, points = x.shape[2:], x.shape[0], grid.shape[1:-1]
    shape = (batch, x.shape[1], *points)
    if 0 in x.shape or 0 in grid.shape:
        return jnp.zeros(shape, x.dtype)
    planes = x.reshape(*x.shape[:2], -1)
    # The grid's last dim is (x, y, z), from the innermost dim outwards.
    coordinates = [
        _unnormalize(grid[..., rank - 1 - d].reshape(batch, -1), size, align_corners)
        for d, size in enumerate(sizes)
    ]
    if mode == _BICUBIC:
        terms = []
        for coordinate, size in zip(coordinates, sizes):
            low = jnp.floor(coordinate)
            weights = _cubic_weights(coordinate - low)
            places = [_inside(low + (k - 1), size, padding, align_corners) for k in range(4)]
            terms.append(list(zip(places, weights)))
    else:
        coordinates = [
            _inside(c, size, padding, align_corners) for c, size in zip(coordinates, sizes)
        ]
        if mode == _NEAREST:
            return _read(planes, [jnp.round(c) for c in coordinates], sizes).reshape(shape)
        terms = []
        for coordinate in coordinates:
            low = jnp.floor(coordinate)
            terms.append([(low, low + 1 - coordinate), (low + 1, coordinate - low)])
    total = jnp.zeros((), x.dtype)
    for corner in itertools.product(*terms):
        weight = corner[0][1]
        for _, w in corner[1:]:
            weight = weight * w
        total = total + _read(planes, [p for p, _ in corner], sizes) * weight[:, None, :]
    return total.reshape(shape)


@lowering("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(
    x: Float[Array, "batch channels *sizes"],
    grid: Float[Array, "batch *points dims"],
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> Float[Array, "batch channels *points"]:
    dtype = op_math(x.dtype)
    return _sample(
        cast(x, dtype), cast(grid, dtype), interpolation_mode, padding_mode, align_corners
    )


@lowering("aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default")
def grid_sampler_backward(
    grad: Float[Array, "batch channels *points"],
    x: Float[Array, "batch channels *sizes"],
    grid: Float[Array, "batch *points dims"],
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Float[Array, "batch channels *sizes"] | None, Float[Array, "batch *points dims"]]:
    dtype = op_math(x.dtype)
    grad, x, grid = cast(grad, dtype), cast(x, dtype), cast(grid, dtype)

    def forward(x: Array, grid: Array) -> Array:
        return _sample(x, grid, interpolation_mode, padding_mode, align_corners)

    if output_mask[0]:
        grad_x, grad_grid = jax.vjp(forward, x, grid)[1](grad)
        return grad_x, grad_grid
    return None, jax.vjp(lambda g: forward(x, g), grid)[1](grad)[0]
