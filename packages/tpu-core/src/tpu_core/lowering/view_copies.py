"""The ``*_copy`` forms of view ops, which ``torch.compile``'s functionalisation and FSDP2 call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import to_numpy_dtype
from tpu_core.lowering.gather_scatter import gather_slices
from tpu_core.lowering.registry import lowering, register_table
from tpu_core.lowering.slicing import slice_bounds, strided_index
from tpu_core.lowering.windows import windows


def _same(x: jax.Array, *_: Any, **__: Any) -> jax.Array:
    return x


def _reshape(x: jax.Array, size: Sequence[int], *, out: Any) -> jax.Array:
    return x.reshape(out[0].shape)


def _reshape_to_out(x: jax.Array, *_: Any, out: Any, **__: Any) -> jax.Array:
    return x.reshape(out[0].shape)


def _expand(x: jax.Array, size: Sequence[int], implicit: bool = False, *, out: Any) -> jax.Array:
    return jnp.broadcast_to(x, out[0].shape)


def _permute(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return lax.transpose(x, [d % x.ndim for d in dims])


def _transpose(x: jax.Array, dim0: int, dim1: int) -> jax.Array:
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


def _slice(
    x: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    dim %= x.ndim
    first, last, _ = slice_bounds(x.shape[dim], start, end, step)
    return lax.slice_in_dim(x, first, max(first, last), step, dim)


def _select(x: jax.Array, dim: int, index: int) -> jax.Array:
    dim %= x.ndim
    return lax.index_in_dim(x, index % x.shape[dim], dim, keepdims=False)


def _narrow(x: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    dim %= x.ndim
    # A start at the very end is an empty slice there, not a wrapped one.
    start = start + x.shape[dim] if start < 0 else start
    return lax.slice_in_dim(x, start, start + length, axis=dim)


def _unbind(x: jax.Array, dim: int = 0) -> tuple[list[jax.Array]]:
    dim %= x.ndim
    return ([lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim])],)


def _split_with_sizes(
    x: jax.Array, split_sizes: Sequence[int], dim: int = 0
) -> tuple[list[jax.Array]]:
    dim %= x.ndim
    ends = np.cumsum(split_sizes).tolist()
    return ([lax.slice_in_dim(x, e - n, e, axis=dim) for n, e in zip(split_sizes, ends)],)


def _split(x: jax.Array, split_size: int, dim: int = 0, *, out: Any) -> tuple[list[jax.Array]]:
    return _split_with_sizes(x, [o.shape[dim % x.ndim] for o in out[0]], dim)


def _diagonal(x: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    return jnp.diagonal(x, offset, dim1, dim2)


def _unfold(x: jax.Array, dimension: int, size: int, step: int) -> jax.Array:
    if x.ndim == 0:
        return jnp.broadcast_to(x, (size,))
    dim = dimension % x.ndim
    return jnp.moveaxis(windows(x, dim, size, step), dim + 1, -1)


@lowering("aten.as_strided_copy.default")
def as_strided_copy(
    x: jax.Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> jax.Array:
    """Strides are those of a contiguous ``x``: a lowering sees values, not memory."""
    index = strided_index(size, stride, storage_offset or 0)
    return gather_slices(x.reshape(-1), (0,), [index], 0)


def _view_as_real(x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)


def _view_as_complex(x: jax.Array) -> jax.Array:
    return lax.complex(x[..., 0], x[..., 1])


def _conj(x: jax.Array) -> jax.Array:
    return jnp.conj(x)


@lowering("aten.view_copy.dtype")
def view_as_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    """The same bytes as another dtype; the last dimension takes up a difference in width."""
    target = to_numpy_dtype(dtype)
    if target == x.dtype:
        return x
    if x.dtype == np.bool_:
        x = x.astype(np.uint8)
    elif x.dtype.kind == "c":
        x = _view_as_real(x)
        x = x.reshape(*x.shape[:-2], -1) if x.ndim > 1 else x
    # XLA bitcasts no booleans and no complex numbers: go through their parts.
    part = np.dtype(np.uint8) if target == np.bool_ else target
    if target.kind == "c":
        part = np.dtype(f"f{target.itemsize // 2}")
    if part.itemsize > x.dtype.itemsize:
        x = x.reshape(*x.shape[:-1], -1, part.itemsize // x.dtype.itemsize)
    narrows = part.itemsize < x.dtype.itemsize
    x = lax.bitcast_convert_type(x, part)
    if narrows:
        x = x.reshape(*x.shape[:-2], -1)
    if target == np.bool_:
        return x != 0
    if target.kind == "c":
        return _view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return x


register_table(
    {
        "aten.alias_copy.default": _same,
        "aten.detach_copy.default": _same,
        "aten.lift.default": _same,
        "aten.lift_fresh_copy.default": _same,
        "aten.view_copy.default": _reshape,
        "aten._reshape_copy.default": _reshape,
        "aten.squeeze_copy.default": _reshape_to_out,
        "aten.squeeze_copy.dim": _reshape_to_out,
        "aten.squeeze_copy.dims": _reshape_to_out,
        "aten.unsqueeze_copy.default": _reshape_to_out,
        "aten.expand_copy.default": _expand,
        "aten.permute_copy.default": _permute,
        "aten.t_copy.default": jnp.transpose,
        "aten.transpose_copy.int": _transpose,
        "aten.slice_copy.Tensor": _slice,
        "aten.select_copy.int": _select,
        "aten.narrow_copy.default": _narrow,
        "aten.unbind_copy.int": _unbind,
        "aten.split_with_sizes_copy.default": _split_with_sizes,
        "aten.split_copy.Tensor": _split,
        "aten.diagonal_copy.default": _diagonal,
        "aten.unfold_copy.default": _unfold,
        "aten.view_as_real_copy.default": _view_as_real,
        "aten.view_as_complex_copy.default": _view_as_complex,
        "aten._conj_copy.default": _conj,
        "aten._neg_view_copy.default": lax.neg,
    }
)
