"""Joining, repeating and reordering whole tensors: ``cat``, ``stack``, ``repeat``, ``roll``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast
from tpu_core.lowering.registry import lowering


def concatenate(parts: Sequence[jax.Array], dim: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, dim)


@lowering("aten.cat.default")
def cat(tensors: Sequence[jax.Array], dim: int = 0, *, out: Any) -> jax.Array:
    """Tensors of shape ``(0,)`` are skipped whatever the rank of the others (aten ``cat``)."""
    shape = out[0].shape
    parts = [t for t in tensors if t.shape != (0,)]
    if not parts or not shape:
        return jnp.zeros(shape, out[0].dtype)
    return concatenate([cast(t, out[0].dtype) for t in parts], dim % len(shape))


@lowering("aten.stack.default")
def stack(tensors: Sequence[jax.Array], dim: int = 0, *, out: Any) -> jax.Array:
    rank = len(out[0].shape)
    dim %= rank
    return concatenate([jnp.expand_dims(cast(t, out[0].dtype), dim) for t in tensors], dim)


@lowering("aten._chunk_cat.default")
def chunk_cat(tensors: Sequence[jax.Array], dim: int, num_chunks: int) -> jax.Array:
    """Each tensor padded in ``dim`` to ``num_chunks`` equal flat chunks, chunks joined (FSDP2)."""
    parts = []
    for t in tensors:
        axis = dim % t.ndim
        t = jnp.pad(t, [(0, -n % num_chunks if d == axis else 0) for d, n in enumerate(t.shape)])
        flat = t.size // num_chunks // max(math.prod(t.shape[:axis]), 1)
        parts.append(t.reshape(*t.shape[:axis], num_chunks, flat))
    rank = parts[0].ndim
    dtype = jnp.result_type(*parts)
    return concatenate([cast(p, dtype) for p in parts], rank - 1)


@lowering("aten.block_diag.default")
def block_diag(tensors: Sequence[jax.Array], *, out: Any) -> jax.Array:
    dtype, width = out[0].dtype, out[0].shape[1]
    rows, left = [], 0
    for t in tensors:
        t = cast(t, dtype).reshape((1,) * (2 - t.ndim) + t.shape)
        rows.append(jnp.pad(t, ((0, 0), (left, width - left - t.shape[1]))))
        left += t.shape[1]
    return concatenate(rows, 0)


@lowering("aten.repeat.default")
def repeat(x: jax.Array, repeats: Sequence[int]) -> jax.Array:
    """A broadcast into new dimensions of the repeats, which are then merged."""
    shape = (1,) * (len(repeats) - x.ndim) + x.shape
    wide: list[int] = []
    kept: list[int] = []
    for count, size in zip(repeats, shape):
        if count != 1 and size != 1:
            wide.append(count)
            kept.append(len(wide))
            wide.append(size)
        else:
            kept.append(len(wide))
            wide.append(count * size)
    x = lax.broadcast_in_dim(x.reshape(shape), tuple(wide), tuple(kept))
    return x.reshape([count * size for count, size in zip(repeats, shape)])


@lowering("aten.roll.default")
def roll(
    x: jax.Array, shifts: int | Sequence[int | jax.Array], dims: Sequence[int] = ()
) -> jax.Array:
    """Without ``dims`` the flattened tensor is rolled."""
    shifts = [shifts] if isinstance(shifts, int) else shifts
    dims = [dims] if isinstance(dims, int) else dims
    if x.size == 0:
        return x
    if not dims:
        return _roll(x.reshape(-1), shifts[0], 0).reshape(x.shape)
    for shift, dim in zip(shifts, dims):
        x = _roll(x, shift, dim % x.ndim)
    return x


def _roll(x: jax.Array, shift: int | jax.Array, dim: int) -> jax.Array:
    size = x.shape[dim]
    if not isinstance(shift, int):  # of a run-time shift: a window of the tensor laid twice
        start = size - jnp.remainder(shift, size)
        return lax.dynamic_slice_in_dim(lax.concatenate([x, x], dim), start, size, dim)
    shift %= size
    if shift == 0:
        return x
    head = lax.slice_in_dim(x, size - shift, size, axis=dim)
    return lax.concatenate([head, lax.slice_in_dim(x, 0, size - shift, axis=dim)], dim)


@lowering("aten.flip.default")
def flip(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return lax.rev(x, tuple(d % x.ndim for d in dims)) if x.ndim else x


@lowering("aten.rot90.default")
def rot90(x: jax.Array, k: int = 1, dims: Sequence[int] = (0, 1)) -> jax.Array:
    return jnp.rot90(x, k, tuple(dims))


@lowering("aten.repeat_interleave.Tensor")
def repeat_interleave(repeats: jax.Array, output_size: int | None = None) -> jax.Array:
    """Index ``i`` ``repeats[i]`` times; PyTorch itself requires that they sum to the size."""
    if output_size is None:
        raise TypeError("repeat_interleave without output_size has a data-dependent result shape.")
    if output_size == 0:
        return jnp.zeros(0, repeats.dtype)
    ends = jnp.cumsum(repeats)
    # Count the ends at or before each position: mark them, then sum up.
    marks = jnp.zeros(output_size, repeats.dtype)
    marks = marks.at[ends].add(np.array(1, repeats.dtype), mode="drop")
    return jnp.cumsum(marks)


@lowering("aten.pixel_shuffle.default")
def pixel_shuffle(x: jax.Array, upscale_factor: int) -> jax.Array:
    *batch, channels, height, width = x.shape
    r, n = upscale_factor, len(batch)
    channels //= r * r
    x = x.reshape(*batch, channels, r, r, height, width)
    x = x.transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return x.reshape(*batch, channels, height * r, width * r)


@lowering("aten.pixel_unshuffle.default")
def pixel_unshuffle(x: jax.Array, downscale_factor: int) -> jax.Array:
    *batch, channels, height, width = x.shape
    r, n = downscale_factor, len(batch)
    x = x.reshape(*batch, channels, height // r, r, width // r, r)
    x = x.transpose(*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return x.reshape(*batch, channels * r * r, height // r, width // r)


@lowering("aten.channel_shuffle.default")
def channel_shuffle(x: jax.Array, groups: int) -> jax.Array:
    batch, channels, *space = x.shape
    x = x.reshape(batch, groups, channels // groups, *space)
    return jnp.swapaxes(x, 1, 2).reshape(batch, channels, *space)
