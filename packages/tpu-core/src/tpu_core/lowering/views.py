"""Reads and writes of a storage's value through a view's geometry, as JAX functions.

A storage's value is an N-d array with its own sizes and strides (its layout). A tensor on that
storage is (sizes, strides, offset). Reading derives the tensor from the value in the first of these
ways that fits: nothing, a window (slice with transpose and broadcast), a reshape, a strided slice,
a reshape and a window, a gather. Writing is the inverse: ``dynamic_update_slice`` or a scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WHOLE, SLICE, GENERAL = range(3)


@dataclass(frozen=True, slots=True)
class Access:
    """Access to a storage's value by an operand or a result.

    Attributes:
        form: ``WHOLE``, ``SLICE`` or ``GENERAL``.
        base_dtype, base_sizes, base_strides: The value's layout.
        dtype, sizes, strides, offset: The tensor's geometry, strides and offset in elements.
        dims: For ``SLICE``, the tensor's dim of each base dim, -1 where one index is selected.
        overwrites: The tensor covers its whole storage.
        chained: Index of the earlier write of the same op into the same storage, or -1.
    """

    form: int
    base_dtype: np.dtype[Any]
    base_sizes: tuple[int, ...]
    base_strides: tuple[int, ...]
    dtype: np.dtype[Any]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dims: tuple[int, ...]
    overwrites: bool
    chained: int = -1

    def starts(self) -> list[int]:
        """Base dims of a ``SLICE`` whose start is a number argument of the node."""
        if self.form != SLICE:
            return []
        return [j for j, size in enumerate(self.base_sizes) if self._extent(j) < size]

    def _extent(self, j: int) -> int:
        return 1 if self.dims[j] < 0 else self.sizes[self.dims[j]]

    def extents(self) -> tuple[int, ...]:
        """Size of the window in each base dim."""
        return tuple(self._extent(j) for j in range(len(self.base_sizes)))


def read(base: jax.Array, access: Access, starts: Sequence[Any] = ()) -> jax.Array:
    """The tensor that ``access`` describes, from its storage's value.

    Args:
        base: The value, of shape ``access.base_sizes``.
        access: Geometry.
        starts: For ``SLICE``, one start a dim of `Access.starts`; Python ints or ``int32`` scalars.
    """
    if access.form == WHOLE:
        return base
    if access.form == SLICE:
        return _read_window(base, access, starts)
    flat_dims, x = _memory_order(base, access)
    if access.base_dtype != access.dtype:
        x, _ = _reinterpret(x.reshape(-1), access.dtype)
        flat_dims = x.shape
    return _read_strided(x, flat_dims, access.sizes, access.strides, access.offset)


def write(
    base: jax.Array, access: Access, value: jax.Array, starts: Sequence[Any] = ()
) -> jax.Array:
    """The storage's value after ``value`` was written through ``access``; inverse of `read`.

    Where a dim of the tensor is repeated (stride 0), its last element is the one that stays.
    """
    if access.form == WHOLE:
        return value
    access, value = _without_repeats(access, value)
    if access.form == SLICE:
        return _write_window(base, access, value, starts)
    order = _descending(access.base_sizes, access.base_strides)
    flat_dims, x = _memory_order(base, access)
    if access.base_dtype != access.dtype:
        if access.dtype == np.bool_:
            # As bytes, since the bytes beside the written ones may hold more than 0 and 1.
            value = value.astype(np.uint8)
        flat, rest = _reinterpret(x.reshape(-1), value.dtype)
        flat = _bitcast(_write_strided(flat, flat.shape, access, value), access.base_dtype)
        x = jnp.concatenate([flat, rest]).reshape(flat_dims)
    else:
        x = _write_strided(x, flat_dims, access, value)
    x = x.reshape(tuple(access.base_sizes[d] for d in order))
    return lax.transpose(x, _inverse(order))


def _without_repeats(access: Access, value: jax.Array) -> tuple[Access, jax.Array]:
    sizes = list(access.sizes)
    for d, stride in enumerate(access.strides):
        if stride == 0 and sizes[d] > 1:
            value = lax.slice_in_dim(value, sizes[d] - 1, sizes[d], axis=d)
            sizes[d] = 1
    return replace(access, sizes=tuple(sizes)), value


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    inverse = [0] * len(order)
    for position, dim in enumerate(order):
        inverse[dim] = position
    return tuple(inverse)


def _descending(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda d: (-strides[d], -sizes[d], d))


def _memory_order(base: jax.Array, access: Access) -> tuple[tuple[int, ...], jax.Array]:
    """The value with its dims in the order of memory, dims of size 1 dropped."""
    order = _descending(access.base_sizes, access.base_strides)
    x = base if order == list(range(base.ndim)) else lax.transpose(base, tuple(order))
    dims = tuple(s for s in x.shape if s != 1)
    return dims, x.reshape(dims)


def _slice(x: jax.Array, starts: Sequence[Any], extents: Sequence[int]) -> jax.Array:
    if all(isinstance(s, int) for s in starts):
        return lax.slice(x, starts, [s + n for s, n in zip(starts, extents)])
    return lax.dynamic_slice(x, [jnp.asarray(s, jnp.int32) for s in starts], extents)


def _all_starts(access: Access, starts: Sequence[Any]) -> list[Any]:
    given = dict(zip(access.starts(), starts, strict=True))
    return [given.get(j, 0) for j in range(len(access.base_sizes))]


def _read_window(base: jax.Array, access: Access, starts: Sequence[Any]) -> jax.Array:
    x = _slice(base, _all_starts(access, starts), access.extents())
    kept = [j for j, d in enumerate(access.dims) if d >= 0]
    x = x.reshape([x.shape[j] for j in kept])
    order = sorted(range(len(kept)), key=lambda i: access.dims[kept[i]])
    x = lax.transpose(x, order)
    return lax.broadcast_in_dim(x, access.sizes, sorted(access.dims[j] for j in kept))


def _write_window(base: jax.Array, access: Access, value: jax.Array, starts: Sequence[Any]) -> Any:
    kept = [j for j, d in enumerate(access.dims) if d >= 0]
    order = sorted(range(len(kept)), key=lambda i: access.dims[kept[i]])
    value = value.reshape([access.sizes[access.dims[kept[i]]] for i in order])
    value = lax.transpose(value, _inverse(order)).reshape(access.extents())
    indices = [jnp.asarray(s, jnp.int32) for s in _all_starts(access, starts)]
    return lax.dynamic_update_slice(base, value, indices)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A strided window over a contiguous array: reshape to ``dims``, then slice."""

    dims: tuple[int, ...]
    starts: tuple[int, ...]
    extents: tuple[int, ...]
    steps: tuple[int, ...]
    order: tuple[int, ...]  # of the window's dims, the core dim each holds; -1 for none


def _core(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dims that move through memory, outermost first."""
    core = [d for d, (n, t) in enumerate(zip(sizes, strides)) if n > 1 and t > 0]
    return sorted(core, key=lambda d: -strides[d])


def _match(
    base: tuple[int, ...], sizes: Sequence[int], strides: Sequence[int], offset: int
) -> _Pattern | None:
    core = _core(sizes, strides)
    return _match_steps(base, core, sizes, strides, offset) or _match_radix(
        base, core, sizes, strides, offset
    )


def _match_steps(
    base: tuple[int, ...], core: list[int], sizes: Any, strides: Any, offset: int
) -> _Pattern | None:
    """Each dim of the view steps through one dim of the base: ``x[:, 1::3]``."""
    row = [1] * len(base)
    for j in range(len(base) - 2, -1, -1):
        row[j] = row[j + 1] * base[j + 1]
    holder = [-1] * len(base)
    step = [1] * len(base)
    for d in core:
        t = strides[d]
        fits = [
            j
            for j in range(len(base))
            if t % row[j] == 0 and t < row[j] * base[j] and holder[j] < 0
        ]
        if not fits:
            return None
        j = fits[0]
        holder[j], step[j] = d, t // row[j]
    starts, extents = [], []
    for j, q in enumerate(row):
        start, offset = divmod(offset, q)
        n = sizes[holder[j]] if holder[j] >= 0 else 1
        if start + (n - 1) * step[j] >= base[j]:
            return None
        starts.append(start)
        extents.append(n)
    if offset:
        return None
    return _Pattern(base, tuple(starts), tuple(extents), tuple(step), tuple(holder))


def _match_radix(
    base: tuple[int, ...], core: list[int], sizes: Any, strides: Any, offset: int
) -> _Pattern | None:
    """The base's elements in mixed radix, one digit a dim of the view: splits and merges of
    dims.
    """
    total = math.prod(base)
    dims, starts, extents, order = [], [], [], []
    left = total
    for d in core:
        t = strides[d]
        if left % t:
            return None
        dims.append(left // t)
        start, offset = divmod(offset, t)
        if start + sizes[d] > left // t:
            return None
        starts.append(start)
        extents.append(sizes[d])
        order.append(d)
        left = t
    if left != 1:
        if offset >= left:
            return None
        dims.append(left)
        starts.append(offset)
        extents.append(1)
        order.append(-1)
    elif offset:
        return None
    return _Pattern(tuple(dims), tuple(starts), tuple(extents), (1,) * len(dims), tuple(order))


def _flat_indices(sizes: Sequence[int], strides: Sequence[int], offset: int) -> jax.Array:
    last = offset + sum((n - 1) * t for n, t in zip(sizes, strides))
    index = jnp.full(sizes, offset, jnp.int32 if last < 2**31 else jnp.int64)
    for d, t in enumerate(strides):
        index = index + lax.broadcasted_iota(index.dtype, tuple(sizes), d) * t
    return index


def _read_strided(
    x: jax.Array, dims: tuple[int, ...], sizes: Sequence[int], strides: Sequence[int], offset: int
) -> jax.Array:
    if 0 in sizes:
        return jnp.zeros(sizes, x.dtype)
    pattern = _match(dims, sizes, strides, offset)
    if pattern is None:
        return x.reshape(-1)[_flat_indices(sizes, strides, offset)]
    x = x.reshape(pattern.dims)
    ends = [s + (n - 1) * k + 1 for s, n, k in zip(pattern.starts, pattern.extents, pattern.steps)]
    x = lax.slice(x, pattern.starts, ends, pattern.steps)
    held = [d for d in pattern.order if d >= 0]
    x = x.reshape([sizes[d] for d in held])
    order = sorted(range(len(held)), key=held.__getitem__)
    return lax.broadcast_in_dim(lax.transpose(x, order), tuple(sizes), sorted(held))


def _write_strided(
    x: jax.Array, dims: tuple[int, ...], access: Access, value: jax.Array
) -> jax.Array:
    sizes, strides, offset = access.sizes, access.strides, access.offset
    if 0 in sizes:
        return x
    shape = x.shape
    pattern = _match(dims, sizes, strides, offset)
    if pattern is None:
        return x.reshape(-1).at[_flat_indices(sizes, strides, offset)].set(value).reshape(shape)
    held = [d for d in pattern.order if d >= 0]
    order = sorted(range(len(held)), key=held.__getitem__)
    value = value.reshape([sizes[held[i]] for i in order])
    value = lax.transpose(value, _inverse(order)).reshape(pattern.extents)
    x = x.reshape(pattern.dims)
    if all(k == 1 for k in pattern.steps):
        x = lax.dynamic_update_slice(x, value, [jnp.int32(s) for s in pattern.starts])
    else:
        window = tuple(
            slice(s, s + (n - 1) * k + 1, k)
            for s, n, k in zip(pattern.starts, pattern.extents, pattern.steps)
        )
        x = x.at[window].set(value)
    return x.reshape(shape)


def _reinterpret(flat: jax.Array, dtype: np.dtype[Any]) -> tuple[jax.Array, jax.Array]:
    """A flat array as another dtype, and the elements at its end that fill no whole element of
    that.
    """
    ratio = max(dtype.itemsize // flat.dtype.itemsize, 1)
    whole = len(flat) // ratio * ratio
    return _bitcast(flat[:whole], dtype), flat[whole:]


def _bitcast(flat: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """A flat array's bytes as another dtype, as ``Tensor.view(dtype)`` does; bool counts as a
    byte.
    """
    source = np.dtype(flat.dtype)
    if source == dtype:
        return flat
    if source == np.bool_:
        return _bitcast(flat.astype(np.uint8), dtype)
    if dtype == np.bool_:
        return _bitcast(flat, np.dtype(np.uint8)) != 0
    if source.kind == "c":
        parts = jnp.stack([jnp.real(flat), jnp.imag(flat)], axis=-1).reshape(-1)
        return _bitcast(parts, dtype)
    if dtype.kind == "c":
        part = np.dtype(np.float32 if dtype.itemsize == 8 else np.float64)
        parts = _bitcast(flat, part).reshape(-1, 2)
        return lax.complex(parts[:, 0], parts[:, 1])
    if source.itemsize >= dtype.itemsize:
        return lax.bitcast_convert_type(flat, dtype).reshape(-1)
    parts = flat.reshape(-1, dtype.itemsize // source.itemsize)
    # XLA makes one of two conversions, and fails where the second has parts of another size.
    return lax.optimization_barrier(lax.bitcast_convert_type(parts, dtype))
