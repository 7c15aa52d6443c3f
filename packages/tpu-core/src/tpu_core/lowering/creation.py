"""Tensors made of constants and ranges, copies, and changes of dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.registry import lowering
from tpu_core.lowering.search import insertion_points
from tpu_core.lowering.tables import table

Array = jax.Array
Out = tuple[jax.ShapeDtypeStruct, ...]


# --- Constants


@lowering("aten.fill.Scalar", "aten.fill.Tensor")
def fill(self: Array, value: Any) -> Array:
    return jnp.broadcast_to(cast(value, self.dtype), self.shape)


@lowering("aten.zero.default")
def zero(self: Array) -> Array:
    return jnp.zeros(self.shape, self.dtype)


def _full(value: Any, out: Out) -> Array:
    return jnp.broadcast_to(cast(value, out[0].dtype), out[0].shape)


@lowering("aten.full.default")
def full(size: Any, fill_value: Any, *, dtype: Any = None, out: Out) -> Array:
    return _full(fill_value, out)


@lowering("aten.full_like.default")
def full_like(self: Array, fill_value: Any, *, dtype: Any = None, out: Out) -> Array:
    return _full(fill_value, out)


@lowering("aten.new_full.default")
def new_full(self: Array, size: Any, fill_value: Any, *, dtype: Any = None, out: Out) -> Array:
    return _full(fill_value, out)


@lowering("aten.zeros.default", "aten._efficientzerotensor.default")
def zeros(size: Any, *, dtype: Any = None, out: Out) -> Array:
    return _full(0, out)


@lowering("aten.zeros_like.default")
def zeros_like(self: Array, *, dtype: Any = None, out: Out) -> Array:
    return _full(0, out)


@lowering("aten.new_zeros.default")
def new_zeros(self: Array, size: Any, *, dtype: Any = None, out: Out) -> Array:
    return _full(0, out)


@lowering("aten.ones.default")
def ones(size: Any, *, dtype: Any = None, out: Out) -> Array:
    return _full(1, out)


@lowering("aten.ones_like.default")
def ones_like(self: Array, *, dtype: Any = None, out: Out) -> Array:
    return _full(1, out)


@lowering("aten.new_ones.default")
def new_ones(self: Array, size: Any, *, dtype: Any = None, out: Out) -> Array:
    return _full(1, out)


@lowering("aten.scalar_tensor.default")
def scalar_tensor(s: Any, *, dtype: Any = None, out: Out) -> Array:
    return _full(s, out)


# Unwritten memory is zero here: a graph's result may show it, and a run must be repeatable.
@lowering(
    "aten.empty.memory_format",
    "aten.empty_strided.default",
    "aten.empty_permuted.default",
    "prims.empty_strided.default",
)
def empty(size: Any, *_: Any, out: Out, **__: Any) -> Array:
    return _full(0, out)


@lowering("aten.empty_like.default", "aten.new_empty.default", "aten.new_empty_strided.default")
def empty_like(self: Array, *_: Any, out: Out, **__: Any) -> Array:
    return _full(0, out)


# --- Copies


@lowering("aten.copy.default")
def copy(self: Array, src: Array, non_blocking: bool = False) -> Array:
    return jnp.broadcast_to(cast(src, self.dtype), self.shape)


@lowering("aten._to_copy.default")
def to_copy(self: Array, *, dtype: Any = None, non_blocking: bool = False, out: Out) -> Array:
    return cast(self, out[0].dtype)


@lowering("prims.convert_element_type.default")
def convert_element_type(a: Array, dtype: Any, *, out: Out) -> Array:
    return cast(a, out[0].dtype)


@lowering("aten.clone.default", "aten._lazy_clone.default")
def clone(self: Array) -> Array:
    return self


# --- Ranges


@lowering("aten.arange.default")
def arange(end: Any, *, dtype: Any = None, out: Out) -> Array:
    return _steps(0, 1, out)


# No kernel finds the length of ``torch.range``, as that of `arange` does: its numbers decide it.
@lowering("aten.range.step", static=("start", "end", "step"))
@lowering("aten.range.default", static=("start", "end"))
@lowering("aten.arange.start", "aten.arange.start_step")
def arange_start(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, out: Out) -> Array:
    # ``end`` only sets the length, so that a moving range needs no new program.
    return _steps(start, step, out)


def _steps(start: Any, step: Any, out: Out) -> Array:
    (length,), dtype = out[0].shape, op_math(out[0].dtype)
    values = lax.iota(dtype, length)
    if not (isinstance(step, (int, float)) and step == 1):
        values = values * cast(step, dtype)
    if not (isinstance(start, (int, float)) and start == 0):
        values = values + cast(start, dtype)
    return values


@lowering(
    "aten.linspace.default",
    "aten.linspace.Scalar_Tensor",
    "aten.linspace.Tensor_Scalar",
    "aten.linspace.Tensor_Tensor",
)
def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None, out: Out) -> Array:
    """Counted from the nearer end, as aten/src/ATen/native/cpu/RangeFactoriesKernel.cpp does."""
    target = out[0].dtype
    integers = target.kind in "iu"
    start, end = (cast(x, target) if integers else x for x in (start, end))
    dtype = np.dtype(np.float64) if integers else op_math(target)
    start, end = cast(start, dtype), cast(end, dtype)
    if steps <= 1:
        return jnp.broadcast_to(start, (steps,))
    step = (end - start) / (steps - 1)
    index = lax.iota(np.int32, steps)
    low = start + step * index.astype(dtype)
    high = end - step * (steps - 1 - index).astype(dtype)
    return jnp.where(2 * index + 2 <= steps, low, high)  # index < steps // 2


@lowering(
    "aten.logspace.default",
    "aten.logspace.Scalar_Tensor",
    "aten.logspace.Tensor_Scalar",
    "aten.logspace.Tensor_Tensor",
)
def logspace(
    start: Any, end: Any, steps: int, base: Any = 10.0, *, dtype: Any = None, out: Out
) -> Array:
    target = out[0].dtype
    integers = target.kind in "iu"
    if integers and steps > 1:  # of one step, ATen raises the base to the start as it is given
        start, end = cast(start, target), cast(end, target)
    dtype = np.dtype(np.float64) if integers else op_math(target)
    exponents = linspace(start, end, steps, out=(jax.ShapeDtypeStruct(out[0].shape, dtype),))
    base = cast(base, dtype)
    powers = jnp.power(base, exponents)
    if integers:  # on GPUs the first power may be off by a rounding, which truncation would show
        powers = jnp.where(exponents == 1, base, powers)
    if integers and target.itemsize >= 4:  # as x86 converts what no integer stands for
        limits = np.iinfo(target)
        fits = (powers >= float(limits.min)) & (powers < float(limits.max) + (target.itemsize == 4))
        powers = jnp.where(fits, powers, float(limits.min))
    return powers


# --- Triangles


def _row_and_column(shape: tuple[int, ...]) -> tuple[Array, Array]:
    rows, columns = shape[-2:]
    return lax.broadcasted_iota(np.int32, (rows, columns), 0), lax.broadcasted_iota(
        np.int32, (rows, columns), 1
    )


@lowering("aten.eye.default", "aten.eye.m")
def eye(n: int, m: int | None = None, *, dtype: Any = None, out: Out) -> Array:
    row, column = _row_and_column(out[0].shape)
    return (row == column).astype(out[0].dtype)


@lowering("aten.tril.default")
def tril(self: Array, diagonal: int | Array = 0) -> Array:
    return _keep(lambda distance, limit: distance <= limit, self, diagonal)


@lowering("aten.triu.default")
def triu(self: Array, diagonal: int | Array = 0) -> Array:
    return _keep(lambda distance, limit: distance >= limit, self, diagonal)


def _keep(test: Callable[[Array, Array], Array], self: Array, diagonal: int | Array) -> Array:
    """The tensor where the distance of its diagonals from the main one passes a test, 0 elsewhere.

    No size is compared with the diagonal: it may be a run-time number, and sizes may vary.
    """
    row, column = _row_and_column(self.shape)
    int32 = np.iinfo(np.int32)
    limit = lax.clamp(np.int64(int32.min), cast(diagonal, np.int64), np.int64(int32.max))
    return jnp.where(test(column - row, limit.astype(np.int32)), self, jnp.zeros((), self.dtype))


@lowering("aten.tril_indices.default")
def tril_indices(row: int, col: int, offset: int = 0, *, dtype: Any = None, out: Out) -> Array:
    length = np.clip(np.arange(row) + offset + 1, 0, col)
    return _indices(np.zeros_like(length), length, out)


@lowering("aten.triu_indices.default")
def triu_indices(row: int, col: int, offset: int = 0, *, dtype: Any = None, out: Out) -> Array:
    first = np.clip(np.arange(row) + offset, 0, col)
    return _indices(first, col - first, out)


def _indices(first: np.ndarray, length: np.ndarray, out: Out) -> Array:
    """Row and column indices of runs; only vectors of one entry a row become constants."""
    dtype, total = out[0].dtype, out[0].shape[1]
    if total == 0:
        return jnp.zeros(out[0].shape, dtype)
    begins = np.cumsum(length) - length
    position = lax.iota(dtype, total)
    row = insertion_points(table(begins + length, dtype), position, right=True)
    column = position - table(begins - first, dtype)[row]
    return jnp.stack([row.astype(dtype), column])
