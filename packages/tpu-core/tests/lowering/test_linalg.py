"""Matrix decompositions and functions against the CPU, up to signs where those are free."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch

from lowering.harness import CompareLowerings, check_opinfo
from tpu_core.dtypes import to_numpy_dtype
from tpu_core.lowering import linalg, lu  # noqa: F401
from tpu_core.lowering.evaluate import call_lowering, to_jax, to_torch
from tpu_core.lowering.registry import REGISTRY

# Sums in another order than LAPACK's, amplified by the matrix's condition.
TOLERANCE = {torch.float32: (1e-4, 1e-4)}
OPINFO = {
    "linalg.cholesky_ex": "aten.linalg_cholesky_ex.default",
    "cholesky": "aten.cholesky.default",
    "cholesky_inverse": "aten.cholesky_inverse.default",
    "cholesky_solve": "aten.cholesky_solve.default",
    "linalg.qr": "aten.linalg_qr.default",
    "geqrf": "aten.geqrf.default",
    "ormqr": "aten.ormqr.default",
    "linalg.householder_product": "aten.linalg_householder_product.default",
    "linalg.cross": "aten.linalg_cross.default",
}


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize("name", OPINFO)
def test_opinfo(name: str) -> None:
    torch.manual_seed(0)
    mode = check_opinfo(name, (torch.float32,), 5, tolerance=TOLERANCE, check_width=True)
    assert not mode.failures, mode.failures
    assert OPINFO[name] in mode.seen


def _call(op: str, args: tuple[Any, ...], like: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Results of a lowering for the shapes that the CPU's results have."""
    out = tuple(jax.ShapeDtypeStruct(tuple(t.shape), to_numpy_dtype(t.dtype)) for t in like)
    with jax.enable_x64(True):
        args = tuple(to_jax(a) if isinstance(a, torch.Tensor) else a for a in args)
        return [to_torch(r) for r in call_lowering(REGISTRY.get(op), args, kwargs, out)]


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(4, 4), (2, 5, 3), (3, 5), (0, 3), (2, 0, 0)])
@pytest.mark.parametrize("full", [False, True])
def test_svd(shape: tuple[int, ...], full: bool) -> None:
    torch.manual_seed(0)
    a = torch.randn(shape)
    like = torch.ops.aten._linalg_svd(a, full, True)
    u, s, vh = _call("aten._linalg_svd.default", (a, full, True), like)
    k = s.shape[-1]
    _close(s, like[1])
    _close(u[..., :k] * s[..., None, :] @ vh[..., :k, :], a)
    _close(u.mT @ u, torch.eye(u.shape[-1]).expand(u.mT.shape[:-1] + u.shape[-1:]))
    _close(vh @ vh.mT, torch.eye(vh.shape[-2]).expand(vh.shape[:-1] + vh.shape[-2:-1]))
    values = torch.ops.aten._linalg_svd(a, full, False)
    _close(_call("aten._linalg_svd.default", (a, full, False), values)[1], values[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("triangle", ["L", "U"])
def test_eigh_reads_one_triangle(triangle: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a = torch.randn(2, 5, 5, dtype=dtype)
    like = torch.ops.aten._linalg_eigh(a, triangle, True)
    values, vectors = _call("aten._linalg_eigh.default", (a, triangle, True), like)
    _close(values, like[0])
    half = a.tril(-1) if triangle == "L" else a.triu(1)
    whole = half + half.mH + torch.diag_embed(a.diagonal(dim1=-2, dim2=-1).real).to(dtype)
    _close(whole @ vectors, vectors * values[..., None, :])
    values_only = torch.ops.aten._linalg_eigh(a, triangle, False)
    _close(_call("aten._linalg_eigh.default", (a, triangle, False), values_only)[0], like[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("upper", [False, True])
def test_cholesky_ends_at_the_first_bad_minor(upper: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    b = torch.randn(6, 5, 5, dtype=dtype)
    a = b @ b.mH + torch.eye(5)
    a[1, 3, 3], a[2, 0, 0], a[3, 4, 4], a[4], a[5, 2, 1] = -1, 0, -10, 0, float("nan")
    a[5, 1, 2] = float("nan")
    like = torch.linalg.cholesky_ex(a, upper=upper)
    factor, info = _call("aten.linalg_cholesky_ex.default", (a,), like, upper=upper)
    assert info.tolist() == like.info.tolist() == [0, 4, 1, 5, 1, 3]
    torch.testing.assert_close(factor, like.L, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (2, 3, 5), (3, 0), (0, 3)])
def test_qr(mode: str, shape: tuple[int, ...]) -> None:
    a = torch.randn(shape)
    compare = CompareLowerings(tolerance=TOLERANCE)
    with compare:
        torch.linalg.qr(a, mode)
    assert not compare.failures, compare.failures


def test_matrix_exp() -> None:
    """Padé here, Taylor in ATen: both are compared with float64, by the norm of the result."""
    torch.manual_seed(0)
    for scale in (0.01, 1.0, 5.0):
        a = torch.randn(2, 5, 5) * scale
        exact = torch.linalg.matrix_exp(a.double())
        (got,) = _call("aten.linalg_matrix_exp.default", (a,), (a,))
        error = torch.linalg.matrix_norm(got - exact) / torch.linalg.matrix_norm(exact)
        assert error.max() < 1e-5
    mode = CompareLowerings(check_width=True)
    with mode:
        torch.linalg.matrix_exp(torch.randn(0, 3, 3))
        torch.linalg.matrix_exp(torch.zeros(3, 3))
    assert not mode.failures, mode.failures


def test_ormqr_of_a_wide_product() -> None:
    torch.manual_seed(0)
    a, tau = torch.geqrf(torch.randn(5, 3))
    mode = CompareLowerings(tolerance=TOLERANCE)
    with mode:
        for left, other in ((True, torch.randn(5, 2)), (False, torch.randn(2, 5))):
            for transpose in (False, True):
                torch.ormqr(a, tau, other, left, transpose)
    assert not mode.failures, mode.failures
