"""Matrix decompositions and functions other than LU's (`tpu_core.lowering.lu`).

A decomposition is unique up to signs or phases only, and each platform may choose them differently.
Nothing can raise inside a program: failure shows in ``info``, or as NaN. General eigenvalues
(``linalg_eig``), least squares and LDL have no lowering: XLA has them on no TPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
from jax import Array, lax

from tpu_core.array_types import Float, Inexact, Int32
from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.lu import solve_triangular
from tpu_core.lowering.matmul import contract
from tpu_core.lowering.registry import lowering


def _adjoint(a: Inexact[Array, "*batch rows columns"]) -> Inexact[Array, "*batch columns rows"]:
    return jnp.conj(jnp.swapaxes(a, -1, -2))


def partial_factor(
    a: Inexact[Array, "*batch n n"],
) -> tuple[Inexact[Array, "*batch n n"], Int32[Array, "*batch"]]:
    """Cholesky factor up to the first leading minor that is not positive definite, and its order,
    or 0 if all are.

    Elimination without pivots, a column a step; only the lower triangle is read. As LAPACK's
    ``potf2`` does, it leaves the pivot that is not positive on the diagonal, and of the columns
    that it does not reach what they were.
    """
    n = a.shape[-1]
    rows = lax.iota(np.int32, n)[:, None]

    def step(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        rest, factor, info = state
        column = lax.dynamic_slice_in_dim(rest, i, 1, a.ndim - 1)
        pivot = jnp.real(lax.dynamic_slice_in_dim(column, i, 1, a.ndim - 2))
        reached = info == 0
        info = jnp.where(reached & ~(pivot[..., 0, 0] > 0), i + np.int32(1), info)
        done = (info == 0)[..., None, None]
        root = jnp.sqrt(pivot)
        head = jnp.where(done, root, pivot).astype(a.dtype)
        kept = lax.dynamic_slice_in_dim(factor, i, 1, a.ndim - 1)
        made = jnp.where(done & (rows > i), column / root, kept)
        made = jnp.where(reached[..., None, None] & (rows == i), head, made)
        factor = lax.dynamic_update_slice_in_dim(factor, made, i, a.ndim - 1)
        below = jnp.where(rows > i, column, jnp.zeros((), a.dtype))
        return rest - below * _adjoint(below) / pivot, factor, info

    start = (a, a, jnp.zeros(a.shape[:-2], np.int32))
    _, factor, info = lax.fori_loop(np.int32(0), np.int32(n), step, start)
    return factor, info


@lowering("aten.linalg_cholesky_ex.default")
def cholesky_ex(
    a: Inexact[Array, "*batch n n"], *, upper: bool = False, check_errors: bool = False
) -> tuple[Inexact[Array, "*batch n n"], Int32[Array, "*batch"]]:
    """Factorization; where it fails, which leaves NaN, it is done again a column a step."""
    if a.size == 0:
        return a, jnp.zeros(a.shape[:-2], np.int32)
    a = _adjoint(a) if upper else a
    factor = lax.linalg.cholesky(a, symmetrize_input=False)
    failed = jnp.any(jnp.isnan(factor), axis=(-2, -1))

    def again() -> tuple[Array, Array]:
        partial, info = partial_factor(a)
        return jnp.where((info == 0)[..., None, None], factor, partial), info

    factor, info = lax.cond(
        jnp.any(failed), again, lambda: (factor, jnp.zeros(failed.shape, np.int32))
    )
    factor = jnp.tril(factor)
    return (_adjoint(factor) if upper else factor), info


@lowering("aten.cholesky.default")
def cholesky(a: Inexact[Array, "*batch n n"], upper: bool = False) -> Inexact[Array, "*batch n n"]:
    """Factorization; NaN where PyTorch raises because ``a`` is not positive definite."""
    if a.size == 0:
        return a
    factor = jnp.tril(lax.linalg.cholesky(_adjoint(a) if upper else a, symmetrize_input=False))
    return _adjoint(factor) if upper else factor


@lowering("aten.cholesky_solve.default", "aten._cholesky_solve_helper.default")
def cholesky_solve(
    b: Inexact[Array, "*#batch rows columns"],
    factor: Inexact[Array, "*#batch rows rows"],
    upper: bool = False,
) -> Inexact[Array, "*batch rows columns"]:
    """``A X = B`` from ``A = L L^H``, or ``A = U^H U``."""
    x = solve_triangular(factor, b, lower=not upper, adjoint=upper)
    return solve_triangular(factor, x, lower=not upper, adjoint=not upper)


@lowering("aten.cholesky_inverse.default")
def cholesky_inverse(
    factor: Inexact[Array, "*batch n n"], upper: bool = False
) -> Inexact[Array, "*batch n n"]:
    one = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return cholesky_solve(one, factor, upper)


@lowering("aten.linalg_qr.default")
def qr(
    a: Inexact[Array, "*batch rows columns"], mode: str = "reduced", *, out: Any
) -> tuple[Inexact[Array, " ..."], Inexact[Array, " ..."]]:
    """Mode ``r`` leaves Q empty."""
    m, n = a.shape[-2:]
    complete = mode == "complete"
    if a.size == 0:
        q = jnp.zeros(out[0].shape, a.dtype)
        if complete:
            q = jnp.broadcast_to(jnp.eye(m, dtype=a.dtype), q.shape)
        return q, jnp.zeros(out[1].shape, a.dtype)
    q, r = lax.linalg.qr(a, full_matrices=complete)
    return (jnp.zeros((0,), a.dtype) if mode == "r" else q), jnp.triu(r)


@lowering("aten._linalg_svd.default")
def svd(
    a: Inexact[Array, "*batch rows columns"],
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
    out: Any,
) -> tuple[Inexact[Array, " ..."], Float[Array, "*batch k"], Inexact[Array, " ..."]]:
    if a.size == 0:
        u, s, vh = (jnp.zeros(o.shape, o.dtype) for o in out)
        if compute_uv and full_matrices:
            u = jnp.broadcast_to(jnp.eye(a.shape[-2], dtype=a.dtype), u.shape)
            vh = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), vh.shape)
        return u, s, vh
    if not compute_uv:
        empty = jnp.zeros((0,), a.dtype)
        return empty, lax.linalg.svd(a, full_matrices=False, compute_uv=False), empty
    return lax.linalg.svd(a, full_matrices=full_matrices, compute_uv=True)


@lowering("aten._linalg_eigh.default")
def eigh(
    a: Inexact[Array, "*batch n n"], UPLO: str = "L", compute_v: bool = True, *, out: Any
) -> tuple[Float[Array, "*batch n"], Inexact[Array, " ..."]]:
    """Eigenvalues ascend; without vectors the second result is empty."""
    if a.size == 0:
        return jnp.zeros(out[0].shape, out[0].dtype), jnp.zeros(out[1].shape, a.dtype)
    vectors, values = lax.linalg.eigh(a, lower=UPLO.upper() == "L", symmetrize_input=False)
    return values, (vectors if compute_v else jnp.zeros((0,), a.dtype))


@lowering("aten.geqrf.default")
def geqrf(
    a: Inexact[Array, "*batch rows columns"],
) -> tuple[Inexact[Array, "*batch rows columns"], Inexact[Array, "*batch k"]]:
    if a.size == 0:
        return a, jnp.zeros((*a.shape[:-2], min(a.shape[-2:])), a.dtype)
    transposed, tau = jnp.linalg.qr(a, mode="raw")
    return jnp.swapaxes(transposed, -1, -2), tau


@lowering("aten.linalg_householder_product.default")
def householder_product(
    a: Inexact[Array, "*batch rows columns"], tau: Inexact[Array, "*batch k"]
) -> Inexact[Array, "*batch rows columns"]:
    m, n = a.shape[-2:]
    if a.size == 0:
        return a
    if tau.shape[-1] == 0:
        return jnp.broadcast_to(jnp.eye(m, n, dtype=a.dtype), a.shape)
    return lax.linalg.householder_product(a, tau)


@lowering("aten.ormqr.default")
def ormqr(
    a: Inexact[Array, "*batch n k"],
    tau: Inexact[Array, "*batch reflectors"],
    other: Inexact[Array, "*batch rows columns"],
    left: bool = True,
    transpose: bool = False,
) -> Inexact[Array, "*batch rows columns"]:
    """``Q C``, ``Q^H C``, ``C Q`` or ``C Q^H`` with the square Q that the reflectors stand for."""
    if other.size == 0:
        return other
    m, k = other.shape[-2 if left else -1], tau.shape[-1]
    batch = [(0, 0, 0)] * (a.ndim - 2)
    zero = jnp.zeros((), a.dtype)
    square = lax.pad(a[..., :k], zero, [*batch, (0, 0, 0), (0, m - k, 0)])
    q = householder_product(square, lax.pad(tau, zero, [*batch, (0, m - k, 0)]))
    q = _adjoint(q) if transpose else q
    lead = tuple(range(other.ndim - 2))
    q = jnp.broadcast_to(q, (*other.shape[:-2], m, m))
    x, y = (q, other) if left else (other, q)
    return contract(x, y, (((x.ndim - 1,), (x.ndim - 2,)), (lead, lead)))


@lowering("aten.linalg_matrix_exp.default")
def matrix_exp(a: Inexact[Array, "*batch n n"]) -> Inexact[Array, "*batch n n"]:
    if a.size == 0:
        return a
    flat = cast(a, op_math(a.dtype)).reshape(-1, *a.shape[-2:])
    return cast(jax.vmap(jax.scipy.linalg.expm)(flat).reshape(a.shape), a.dtype)


@lowering("aten.linalg_cross.default")
def cross(a: Array, b: Array, *, dim: int = -1) -> Array:
    a, b = jnp.broadcast_arrays(a, b)
    axis = dim % a.ndim

    def turn(x: Array, by: int) -> Array:
        """The elements ``(by, by + 1, by + 2)`` modulo 3."""
        head = lax.slice_in_dim(x, by, 3, axis=axis)
        return jnp.concatenate([head, lax.slice_in_dim(x, 0, by, axis=axis)], axis=axis)

    return turn(a, 1) * turn(b, 2) - turn(a, 2) * turn(b, 1)
