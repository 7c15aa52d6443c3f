"""Checks of matrices that cannot be inverted, or are not positive definite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpu_core.lowering.checks import Finding, check, has_elements
from tpu_core.lowering.linalg import partial_factor
from tpu_core.lowering.lu import first_zero

_MINOR = (
    "The factorization could not be completed because the input is not positive-definite (the "
    "leading minor of order {0} is not positive-definite)."
)
_SINGULAR = (
    "The diagonal element {0} is zero, the inversion could not be completed because the input "
    "matrix is singular."
)
_SOLVER = "The solver failed because the input matrix is singular."
_FACTOR = (
    "U[{0},{0}] is zero and using it on lu_solve would result in a division by zero. If you still "
    "want to perform the factorization, consider calling linalg.lu(A, pivot) or "
    "linalg.lu_factor_ex(A, pivot)"
)


def _checks_errors(plan: Any) -> bool:
    return bool(plan.argument("check_errors")) and has_elements(plan)


def _of_info(
    info: jax.Array, name: str, text: str, kind: Callable[[str], Exception]
) -> Iterator[Finding]:
    """A finding where LAPACK's ``info`` of a matrix, or of one in a batch, is not 0."""
    if info.size == 0:
        return
    flat = info.reshape(-1).astype(np.int64)
    first = jnp.argmax(flat != 0)
    value = (first.astype(np.int64) << 32) + flat[first]
    error = functools.partial(_error, name, text, kind, info.ndim > 0)
    yield Finding(flat[first] != 0, value, error)


def _error(
    name: str, text: str, kind: Callable[[str], Exception], has_batch: bool, value: int
) -> Exception:
    batch, info = value >> 32, value & 0xFFFFFFFF
    where = f"(Batch element {batch}): " if has_batch else ""
    return kind(f"{name}: {where}{text.format(info)}")


@check("aten.linalg_cholesky_ex.default", applies=_checks_errors)
def cholesky_ex(
    a: jax.Array, *, check_errors: bool = False, result: Any, **_: Any
) -> Iterator[Finding]:
    if check_errors:
        yield from _of_info(result[1], "linalg.cholesky_ex", _MINOR, torch.linalg.LinAlgError)


@check("aten.linalg_inv_ex.default", applies=_checks_errors)
def inv_ex(a: jax.Array, *, check_errors: bool = False, result: Any) -> Iterator[Finding]:
    if check_errors:
        yield from _of_info(result[1], "linalg.inv_ex", _SINGULAR, torch.linalg.LinAlgError)


@check("aten.linalg_lu_factor_ex.default", applies=_checks_errors)
def lu_factor_ex(
    a: jax.Array, *, check_errors: bool = False, result: Any, **_: Any
) -> Iterator[Finding]:
    if check_errors:
        yield from _of_info(result[2], "torch.linalg.lu_factor_ex", _FACTOR, RuntimeError)


@check("aten._linalg_solve_ex.default", applies=_checks_errors)
def solve_ex(
    a: jax.Array, b: jax.Array, *, check_errors: bool = False, result: Any, **_: Any
) -> Iterator[Finding]:
    if check_errors:
        yield from _of_info(result[3], "torch.linalg.solve_ex", _SOLVER, torch.linalg.LinAlgError)


@check("aten.cholesky.default", applies=has_elements)
def cholesky(a: jax.Array, upper: bool = False, *, result: Any) -> Iterator[Finding]:
    if a.size == 0:
        return
    failed = jnp.any(jnp.isnan(result), axis=(-2, -1))
    lower = jnp.conj(jnp.swapaxes(a, -1, -2)) if upper else a
    info = lax.cond(
        jnp.any(failed),
        lambda: partial_factor(lower)[1],
        lambda: jnp.zeros(failed.shape, np.int32),
    )
    yield from _of_info(info, "cholesky", _MINOR, torch.linalg.LinAlgError)


@check("aten.cholesky_inverse.default", applies=has_elements)
def cholesky_inverse(factor: jax.Array, *_: Any, **__: Any) -> Iterator[Finding]:
    if factor.size:
        info = first_zero(jnp.diagonal(factor, axis1=-2, axis2=-1))
        yield from _of_info(info, "cholesky_inverse", _SINGULAR, torch.linalg.LinAlgError)
