"""Lowerings of ATen's reductions: sums, extrema, truth, moments and norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, op_math, to_numpy_dtype
from tpu_core.lowering.registry import lowering, register_table

Dims = Sequence[int] | int | None


def axes_of(x: jax.Array, dim: Dims) -> tuple[int, ...]:
    """Non-negative axes that ``dim`` names; none or an empty list means all, as in ATen."""
    dims = [dim] if isinstance(dim, int) else dim
    if not dims:
        return tuple(range(x.ndim))
    # A 0-d tensor accepts dim 0 and -1.
    return tuple(sorted({d % x.ndim for d in dims})) if x.ndim else ()


def keep(reduced: jax.Array, x: jax.Array, axes: tuple[int, ...], keepdim: bool) -> jax.Array:
    """``reduced`` with size-1 axes where ``x`` was reduced, if ``keepdim``."""
    return lax.expand_dims(reduced, axes) if keepdim and axes else reduced


def count_of(x: jax.Array, axes: tuple[int, ...]) -> int:
    """Number of elements that one result of a reduction over ``axes`` sees."""
    return math.prod(x.shape[a] for a in axes)


def sum_over(x: jax.Array, axes: tuple[int, ...], keepdim: bool = False) -> jax.Array:
    return keep(lax.reduce_sum(x, axes), x, axes, keepdim)


def _operand(x: jax.Array, dtype: Any, out: Any) -> jax.Array:
    """``x`` rounded to ``dtype=`` (default: the result's dtype), in the dtype to compute in."""
    dtype = to_numpy_dtype(dtype) if dtype is not None else out[0].dtype
    return cast(cast(x, dtype), op_math(dtype))


@lowering("aten.sum.default", "aten.sum.dim_IntList")
def sum_(
    x: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None, out: Any
) -> jax.Array:
    return sum_over(_operand(x, dtype, out), axes_of(x, dim), keepdim)


@lowering("aten.nansum.default")
def nansum(
    x: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None, out: Any
) -> jax.Array:
    x = _operand(x, dtype, out)
    if np.dtype(x.dtype).kind not in "biu":
        x = jnp.where(x != x, jnp.zeros((), x.dtype), x)
    return sum_over(x, axes_of(x, dim), keepdim)


@lowering("aten.mean.default", "aten.mean.dim")
def mean(
    x: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None, out: Any
) -> jax.Array:
    return mean_over(_operand(x, dtype, out), axes_of(x, dim), keepdim)


def mean_over(x: jax.Array, axes: tuple[int, ...], keepdim: bool = False) -> jax.Array:
    """Mean in ``x``'s own dtype; NaN over no elements."""
    return sum_over(x, axes, keepdim) / cast(count_of(x, axes), x.dtype)


@lowering("aten.prod.default", "aten.prod.dim_int")
def prod(
    x: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None, out: Any
) -> jax.Array:
    x, axes = _operand(x, dtype, out), axes_of(x, dim)
    return keep(lax.reduce_prod(x, axes), x, axes, keepdim)


@lowering("aten.trace.default")
def trace(x: jax.Array, *, out: Any) -> jax.Array:
    n = min(x.shape)
    square = cast(lax.slice(x, (0, 0), (n, n)), op_math(out[0].dtype))
    row, column = (lax.broadcasted_iota(np.int32, (n, n), axis) for axis in (0, 1))
    return lax.reduce_sum(jnp.where(row == column, square, jnp.zeros((), square.dtype)), (0, 1))


def _extremum(
    x: jax.Array, dim: Dims = (), keepdim: bool = False, *, reduce: Callable[..., jax.Array]
) -> jax.Array:
    # XLA's maximum and minimum propagate NaN, as ATen's do.
    axes = axes_of(x, dim)
    return keep(reduce(x, axes), x, axes, keepdim)


amax = partial(_extremum, reduce=lax.reduce_max)
amin = partial(_extremum, reduce=lax.reduce_min)


def _arg(
    x: jax.Array, dim: int | None = None, keepdim: bool = False, *, reduce: Callable[..., Any]
) -> jax.Array:
    """First index of the extremum or of a NaN; computed in int32, which TPUs have natively."""
    if x.dtype == np.bool_:
        x = x.astype(np.uint8)
    if x.ndim == 0:
        return jnp.zeros((), np.int64)
    flat = x if dim is not None else lax.reshape(x, (x.size,))
    axis = dim % x.ndim if dim is not None else 0
    wide = flat.shape[axis] > np.iinfo(np.int32).max
    index = reduce(flat, axis, np.int64 if wide else np.int32)
    axes = (axis,) if dim is not None else tuple(range(x.ndim))
    return keep(index, x, axes, keepdim)


argmax = partial(_arg, reduce=lax.argmax)
argmin = partial(_arg, reduce=lax.argmin)


# Values and index are two reductions, so that the one that nobody reads is never computed.
def max_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return amax(x, dim, keepdim), argmax(x, dim, keepdim)


def min_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return amin(x, dim, keepdim), argmin(x, dim, keepdim)


def aminmax(
    x: jax.Array, *, dim: int | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    return amin(x, dim, keepdim), amax(x, dim, keepdim)


def _truth_axes(x: jax.Array, dim: Dims) -> tuple[int, ...]:
    # Unlike every other reduction, `any` and `all` over an empty list of dims reduce nothing.
    return () if isinstance(dim, (list, tuple)) and not dim else axes_of(x, dim)


def any_(x: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    axes = _truth_axes(x, dim)
    return keep(lax.reduce_or(cast(x, np.bool_), axes), x, axes, keepdim)


def all_(x: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    axes = _truth_axes(x, dim)
    return keep(lax.reduce_and(cast(x, np.bool_), axes), x, axes, keepdim)


def count_nonzero(x: jax.Array, dim: Dims = None) -> jax.Array:
    return lax.reduce_sum(cast(x, np.bool_).astype(np.int64), axes_of(x, dim))


register_table(
    {
        "aten.amax.default": amax,
        "aten.amin.default": amin,
        "aten.max.default": amax,
        "aten.min.default": amin,
        "aten.max.dim": max_dim,
        "aten.min.dim": min_dim,
        "aten.aminmax.default": aminmax,
        "aten.argmax.default": argmax,
        "aten.argmin.default": argmin,
        "aten.any.default": any_,
        "aten._is_any_true.default": any_,
        "aten.any.dim": any_,
        "aten.any.dims": any_,
        "aten.all.default": all_,
        "aten._is_all_true.default": all_,
        "aten.all.dim": all_,
        "aten.all.dims": all_,
        "aten.count_nonzero.default": count_nonzero,
        "aten.count_nonzero.dim_IntList": count_nonzero,
    }
)


def moments(
    x: jax.Array, axes: tuple[int, ...], correction: float = 0, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Variance and mean in the dtype to compute in.

    Two passes: ``E[x^2] - E[x]^2`` cancels in float32, where ATen's Welford sum does not.
    """
    x = cast(x, op_math(x.dtype))
    average = mean_over(x, axes, keepdim=True)
    square = square_abs(x - average)
    # ATen clamps the degrees of freedom at zero: the result is then NaN or infinite.
    freedom = max(0.0, count_of(x, axes) - correction)
    variance = sum_over(square, axes, keepdim) / np.asarray(freedom, square.dtype)
    return variance, average if keepdim else lax.squeeze(average, axes)


def square_abs(x: jax.Array) -> jax.Array:
    """``|x|^2``, real for complex ``x``."""
    if np.dtype(x.dtype).kind == "c":
        return lax.real(x) * lax.real(x) + lax.imag(x) * lax.imag(x)
    return x * x


@lowering("aten.var_mean.correction", static=("correction",))
def var_mean(
    x: jax.Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    return moments(x, axes_of(x, dim), 1 if correction is None else correction, keepdim)


@lowering("aten.std_mean.correction", static=("correction",))
def std_mean(x: jax.Array, dim: Dims = None, **options: Any) -> tuple[jax.Array, jax.Array]:
    variance, average = var_mean(x, dim, **options)
    return lax.sqrt(variance), average


@lowering("aten.var.correction", static=("correction",))
def var(x: jax.Array, dim: Dims = None, **options: Any) -> jax.Array:
    return var_mean(x, dim, **options)[0]


@lowering("aten.std.correction", static=("correction",))
def std(x: jax.Array, dim: Dims = None, **options: Any) -> jax.Array:
    return lax.sqrt(var(x, dim, **options))


def vector_norm(x: jax.Array, p: float, axes: tuple[int, ...], keepdim: bool = False) -> jax.Array:
    """The p-norm of ``x`` over ``axes``, in ``x``'s own real dtype."""
    if p == 2:
        return lax.sqrt(power_sum(x, p, axes, keepdim))
    if p == 0:
        return sum_over((x != 0).astype(lax.abs(x).dtype), axes, keepdim)
    if math.isinf(p):
        x = lax.abs(x)
        return keep((lax.reduce_max if p > 0 else lax.reduce_min)(x, axes), x, axes, keepdim)
    total = power_sum(x, p, axes, keepdim)
    return total if p == 1 else lax.pow(total, np.asarray(1.0 / p, total.dtype))


def power_sum(x: jax.Array, p: float, axes: tuple[int, ...], keepdim: bool = False) -> jax.Array:
    """The sum of ``|x|^p`` over ``axes``, in ``x``'s own real dtype."""
    if p == 2:
        return sum_over(square_abs(x), axes, keepdim)
    x = lax.abs(x)
    return sum_over(x if p == 1 else lax.pow(x, np.asarray(p, x.dtype)), axes, keepdim)


@lowering("aten.linalg_vector_norm.default", static=("ord",))
def linalg_vector_norm(
    x: jax.Array,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> jax.Array:
    x = cast(x, op_math(to_numpy_dtype(dtype) if dtype is not None else x.dtype))
    return vector_norm(x, float(ord), axes_of(x, dim), keepdim)


@lowering("aten.linalg__powsum.default", static=("ord",))
def linalg_powsum(
    x: jax.Array,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> jax.Array:
    """A real ``dtype`` of a complex operand is that of the result, as the CPU has it."""
    wanted = np.dtype(x.dtype if dtype is None else to_numpy_dtype(dtype))
    wanted = np.dtype(op_math(wanted))
    if np.dtype(x.dtype).kind == "c" and wanted.kind != "c":
        wanted = np.result_type(wanted, np.complex64)
    return power_sum(cast(x, wanted), float(ord), axes_of(x, dim), keepdim)


@lowering(
    "aten.norm.Scalar",
    "aten.norm.ScalarOpt_dim",
    "aten.norm.ScalarOpt_dim_dtype",
    "aten.norm.ScalarOpt_dtype",
    static=("p",),
)
def norm(
    x: jax.Array,
    p: float | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> jax.Array:
    return linalg_vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@lowering("aten.dist.default", static=("p",))
def dist(x: jax.Array, y: jax.Array, p: float = 2) -> jax.Array:
    dtype = op_math(jnp.promote_types(x.dtype, y.dtype))
    difference = cast(x, dtype) - cast(y, dtype)
    return vector_norm(difference, float(p), axes_of(difference, None))


@lowering("aten.logsumexp.default")
def logsumexp(x: jax.Array, dim: Dims, keepdim: bool = False, *, out: Any) -> jax.Array:
    x, axes = cast(x, op_math(out[0].dtype)), axes_of(x, dim)
    real = lax.real(x) if np.dtype(x.dtype).kind == "c" else x
    if x.size:
        top = amax(real, axes, keepdim=True)
        # An infinite maximum would give inf - inf (ReduceOps.cpp, logsumexp_out_impl).
        top = jnp.where(jnp.isinf(top), jnp.zeros((), top.dtype), top)
    else:
        top = jnp.zeros([1 if a in axes else n for a, n in enumerate(x.shape)], real.dtype)
    total = lax.log(sum_over(lax.exp(x - top.astype(x.dtype)), axes, keepdim=True))
    result = total + top.astype(x.dtype)
    return result if keepdim else lax.squeeze(result, axes)
