"""LU factorizations, and the solves, inverses and determinants that stand on them.

Pivots count from 1, as LAPACK's do. Nothing can raise inside a program: a singular matrix gives a
nonzero ``info`` (the first zero of U's diagonal), which PyTorch's callers check.

For a contiguous real ``A``, ATen's ``_linalg_det`` and ``_linalg_slogdet`` factorize the transpose,
and the gradient formulas ask ``A.is_contiguous()`` to know it (BatchLinearAlgebra.cpp,
FunctionsManual.cpp). Their lowerings therefore take ``contiguous``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpu_core.array_types import Float, Inexact, Int32
from tpu_core.lowering.registry import lowering


def _transposed(a: Inexact[Array, "*batch rows columns"]) -> Inexact[Array, "*batch columns rows"]:
    return jnp.swapaxes(a, -1, -2)


def _diagonal(a: Inexact[Array, "*batch rows columns"]) -> Inexact[Array, "*batch k"]:
    return jnp.diagonal(a, axis1=-2, axis2=-1)


def solve_triangular(
    a: Inexact[Array, "*#batch n n"],
    b: Inexact[Array, "*#batch rows columns"],
    *,
    lower: bool,
    left: bool = True,
    unit: bool = False,
    transpose: bool = False,
    adjoint: bool = False,
) -> Inexact[Array, "*batch rows columns"]:
    """``op(A) X = B`` or ``X op(A) = B``, batches broadcast."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = jnp.broadcast_to(a, (*batch, *a.shape[-2:]))
    b = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    if b.size == 0:
        return b
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=lower, unit_diagonal=unit,
        transpose_a=transpose or adjoint, conjugate_a=adjoint,
    )  # fmt: skip


def factor(
    a: Inexact[Array, "*batch rows columns"], pivot: bool = True
) -> tuple[Inexact[Array, "*batch rows columns"], Int32[Array, "*batch k"], Int32[Array, "*batch"]]:
    """Packed L and U, pivots from 1, and which diagonal element of U is the first to be 0."""
    m, n = a.shape[-2:]
    k = min(m, n)
    if a.size == 0:
        counts = lax.broadcasted_iota(np.int32, (*a.shape[:-2], k), max(a.ndim - 2, 0)) + 1
        return a, counts, jnp.zeros(a.shape[:-2], np.int32)
    if pivot:
        packed, pivots, _ = lax.linalg.lu(a)
        pivots = pivots + np.int32(1)
    else:
        packed = _factor_without_pivots(a)
        pivots = jnp.broadcast_to(lax.iota(np.int32, k) + 1, (*a.shape[:-2], k))
    return packed, pivots, first_zero(_diagonal(packed))


def first_zero(diagonal: Inexact[Array, "*batch k"]) -> Int32[Array, "*batch"]:
    """Position from 1 of the first 0 on a diagonal, 0 where there is none."""
    zero = diagonal == 0
    first = jnp.argmax(zero, axis=-1).astype(np.int32) + np.int32(1)
    return jnp.where(jnp.any(zero, axis=-1), first, np.int32(0))


def _factor_without_pivots(
    a: Inexact[Array, "*batch rows columns"],
) -> Inexact[Array, "*batch rows columns"]:
    """Gaussian elimination, a column a step."""
    m, n = a.shape[-2:]
    rows, columns = lax.iota(np.int32, m), lax.iota(np.int32, n)

    def step(i: Array, a: Array) -> Array:
        pivot = lax.dynamic_slice_in_dim(a, i, 1, a.ndim - 2)
        head = lax.dynamic_slice_in_dim(pivot, i, 1, a.ndim - 1)
        column = lax.dynamic_slice_in_dim(a, i, 1, a.ndim - 1)
        below = (rows > i)[:, None]
        column = jnp.where(below, column / head, column)
        update = jnp.where(below & (columns > i)[None, :], column * pivot, jnp.zeros((), a.dtype))
        return lax.dynamic_update_slice_in_dim(a - update, column, i, a.ndim - 1)

    return lax.fori_loop(np.int32(0), np.int32(min(m, n)), step, a)


def permutation(pivots: Int32[Array, "*batch k"], size: int) -> Int32[Array, "*batch {size}"]:
    """Row order that pivots (from 1) stand for: ``A[permutation] = L U``."""
    if pivots.size == 0:
        return jnp.broadcast_to(lax.iota(np.int32, size), (*pivots.shape[:-1], size))
    return lax.linalg.lu_pivots_to_permutation(pivots - np.int32(1), size)


def _permutation_matrix(
    order: Int32[Array, "*batch n"], dtype: Any
) -> Inexact[Array, "*batch n n"]:
    """P of ``A = P L U``."""
    size = order.shape[-1]
    rows = lax.broadcasted_iota(np.int32, (*order.shape, size), order.ndim - 1)
    return (order[..., None, :] == rows).astype(dtype)


def _lower_upper(
    packed: Inexact[Array, "*batch rows columns"],
) -> tuple[Inexact[Array, "*batch rows k"], Inexact[Array, "*batch k columns"]]:
    m, n = packed.shape[-2:]
    k = min(m, n)
    one = jnp.eye(m, k, dtype=packed.dtype)
    return jnp.tril(packed[..., :, :k], -1) + one, jnp.triu(packed[..., :k, :])


def solve(
    packed: Inexact[Array, "*#batch n n"],
    pivots: Int32[Array, "*#batch n"],
    b: Inexact[Array, "*#batch rows columns"],
    left: bool = True,
    adjoint: bool = False,
) -> Inexact[Array, "*batch rows columns"]:
    """``A X = B``, ``X A = B`` or the same of ``A``'s adjoint, from its factorization."""
    size = packed.shape[-1]
    batch = jnp.broadcast_shapes(packed.shape[:-2], b.shape[:-2])
    b = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    order = jnp.broadcast_to(permutation(pivots, size), (*batch, size))
    axis = b.ndim - 2 if left else b.ndim - 1

    def take(x: Array, order: Array) -> Array:
        index = order[..., :, None] if left else order[..., None, :]
        return jnp.take_along_axis(x, index, axis=axis, mode="clip")

    # P^T A = L U. From the left L comes first, unless adjoint; from the right it is the reverse.
    lower: dict[str, Any] = {"lower": True, "unit": True, "left": left, "adjoint": adjoint}
    upper: dict[str, Any] = {"lower": False, "left": left, "adjoint": adjoint}
    if left != adjoint:
        b = take(b, order)
        return solve_triangular(packed, solve_triangular(packed, b, **lower), **upper)
    b = solve_triangular(packed, solve_triangular(packed, b, **upper), **lower)
    return take(b, jnp.argsort(order, axis=-1))


@lowering("aten.linalg_lu_factor_ex.default")
def lu_factor_ex(
    a: Inexact[Array, "*batch rows columns"], *, pivot: bool = True, check_errors: bool = False
) -> tuple[Inexact[Array, "*batch rows columns"], Int32[Array, "*batch k"], Int32[Array, "*batch"]]:
    return factor(a, pivot)


@lowering("aten.linalg_lu.default")
def lu(
    a: Inexact[Array, "*batch rows columns"], *, pivot: bool = True
) -> tuple[
    Inexact[Array, " ..."], Inexact[Array, "*batch rows k"], Inexact[Array, "*batch k columns"]
]:
    """Without pivoting P is empty."""
    packed, pivots, _ = factor(a, pivot)
    lower, upper = _lower_upper(packed)
    if not pivot:
        return jnp.zeros((0,), a.dtype), lower, upper
    return _permutation_matrix(permutation(pivots, a.shape[-2]), a.dtype), lower, upper


@lowering("aten.lu_unpack.default")
def lu_unpack(
    packed: Inexact[Array, "*batch rows columns"],
    pivots: Int32[Array, "*batch k"],
    unpack_data: bool = True,
    unpack_pivots: bool = True,
) -> tuple[Inexact[Array, " ..."], Inexact[Array, " ..."], Inexact[Array, " ..."]]:
    """Factors of a packed LU; those not requested are empty."""
    empty = jnp.zeros((0,), packed.dtype)
    lower, upper = _lower_upper(packed) if unpack_data else (empty, empty)
    if not unpack_pivots:
        return empty, lower, upper
    order = permutation(pivots, packed.shape[-2])
    return _permutation_matrix(order, packed.dtype), lower, upper


@lowering("aten.linalg_lu_solve.default")
def lu_solve(
    packed: Inexact[Array, "*#batch n n"],
    pivots: Int32[Array, "*#batch n"],
    b: Inexact[Array, "*#batch rows columns"],
    *,
    left: bool = True,
    adjoint: bool = False,
) -> Inexact[Array, "*batch rows columns"]:
    return solve(packed, pivots, b, left, adjoint)


@lowering("aten._linalg_solve_ex.default")
def solve_ex(
    a: Inexact[Array, "*batch n n"],
    b: Inexact[Array, " ..."],
    *,
    left: bool = True,
    check_errors: bool = False,
) -> tuple[
    Inexact[Array, " ..."],
    Inexact[Array, "*batch n n"],
    Int32[Array, "*batch n"],
    Int32[Array, "*batch"],
]:
    packed, pivots, info = factor(a)
    # A vector, or a batch of them, as ATen's linalg_solve_is_vector_rhs decides.
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and a.shape[:-1] == b.shape)
    x = solve(packed, pivots, b[..., None] if vector else b, left)
    return (x[..., 0] if vector else x), packed, pivots, info


@lowering("aten.linalg_inv_ex.default")
def inv_ex(
    a: Inexact[Array, "*batch n n"], *, check_errors: bool = False
) -> tuple[Inexact[Array, "*batch n n"], Int32[Array, "*batch"]]:
    packed, pivots, info = factor(a)
    one = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    return solve(packed, pivots, one), info


def _parity(pivots: Int32[Array, "*batch k"], dtype: Any) -> Inexact[Array, "*batch"]:
    """Sign of the permutation: each pivot that is not its own row is one exchange."""
    own = lax.iota(np.int32, pivots.shape[-1]) + np.int32(1)
    exchanges = jnp.sum((pivots != own).astype(np.int32), axis=-1, dtype=np.int32)
    return (1 - 2 * (exchanges % 2)).astype(dtype)


def _factors_transpose(a: Array, contiguous: Sequence[bool]) -> bool:
    return bool(contiguous[0]) and np.dtype(a.dtype).kind != "c"


@lowering("aten._linalg_det.default")
def det(
    a: Inexact[Array, "*batch n n"], *, contiguous: Sequence[bool] = (True,)
) -> tuple[Inexact[Array, "*batch"], Inexact[Array, "*batch n n"], Int32[Array, "*batch n"]]:
    packed, pivots, _ = factor(_transposed(a) if _factors_transpose(a, contiguous) else a)
    value = jnp.prod(_diagonal(packed), axis=-1) * _parity(pivots, a.dtype)
    return value, packed, pivots


@lowering("aten._linalg_slogdet.default")
def slogdet(
    a: Inexact[Array, "*batch n n"], *, contiguous: Sequence[bool] = (True,)
) -> tuple[
    Inexact[Array, "*batch"],
    Float[Array, "*batch"],
    Inexact[Array, "*batch n n"],
    Int32[Array, "*batch n"],
]:
    packed, pivots, _ = factor(_transposed(a) if _factors_transpose(a, contiguous) else a)
    diagonal = _diagonal(packed)
    sign = jnp.prod(jnp.sign(diagonal), axis=-1) * _parity(pivots, a.dtype)
    return sign, jnp.sum(jnp.log(jnp.abs(diagonal)), axis=-1), packed, pivots


@lowering("aten.linalg_solve_triangular.default")
def linalg_solve_triangular(
    a: Inexact[Array, "*#batch n n"],
    b: Inexact[Array, "*#batch rows columns"],
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Inexact[Array, "*batch rows columns"]:
    return solve_triangular(a, b, lower=not upper, left=left, unit=unitriangular)


@lowering("aten.triangular_solve.default")
def triangular_solve(
    b: Array,
    a: Array,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Array, Array]:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = jnp.broadcast_to(a, (*batch, *a.shape[-2:]))
    x = solve_triangular(a, b, lower=not upper, unit=unitriangular, transpose=transpose)
    return x, a
