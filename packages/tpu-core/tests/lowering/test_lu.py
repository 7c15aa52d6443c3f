"""LU factorizations and what stands on them, against the CPU."""

from __future__ import annotations

import jax
import pytest
import torch

from lowering.harness import CompareLowerings, check_opinfo
from tpu_core.lowering import lu
from tpu_core.lowering.evaluate import to_jax, to_torch

# Solutions of one system by two orders of elimination.
TOLERANCE = {torch.float32: (1e-4, 1e-4)}
OPINFO = {
    "linalg.lu_factor_ex": {"aten.linalg_lu_factor_ex.default", "aten.lu_unpack.default"},
    "linalg.lu": {"aten.linalg_lu.default"},
    "linalg.lu_solve": {"aten.linalg_lu_solve.default"},
    "linalg.solve_ex": {"aten._linalg_solve_ex.default", "aten.linalg_lu_solve.default"},
    "linalg.inv_ex": {"aten.linalg_inv_ex.default"},
    "linalg.det": {"aten._linalg_det.default"},
    "linalg.slogdet": {"aten._linalg_slogdet.default"},
    "linalg.solve_triangular": {"aten.linalg_solve_triangular.default"},
    "triangular_solve": {"aten.triangular_solve.default"},
}


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("name", OPINFO)
def test_opinfo(name: str) -> None:
    torch.manual_seed(0)
    mode = check_opinfo(name, (torch.float32,), 3, tolerance=TOLERANCE, check_width=True)
    assert not mode.failures, mode.failures
    assert OPINFO[name] <= mode.seen


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "complex"])
def test_layouts_and_sides(kind: str) -> None:
    """Which factorization is kept for the gradient depends on the layout of ``A``."""
    torch.manual_seed(0)
    a = torch.randn(2, 4, 4, dtype=torch.complex64 if kind == "complex" else torch.float32)
    a = a.mT if kind == "transposed" else a
    b = torch.randn(2, 4, 4).to(a.dtype)
    mode = CompareLowerings(tolerance={**TOLERANCE, torch.complex64: (1e-4, 1e-4)})
    with mode:
        torch.linalg.det(a)
        torch.linalg.slogdet(a)
        torch.linalg.solve(a, b[..., 0])
        torch.linalg.solve(a, b, left=False)
        packed, pivots, _ = torch.linalg.lu_factor_ex(a)
        for left in (True, False):
            for adjoint in (True, False):
                torch.linalg.lu_solve(packed, pivots, b, left=left, adjoint=adjoint)
    assert not mode.failures, mode.failures


def test_singular_rectangular_and_empty() -> None:
    singular = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    mode = CompareLowerings()
    with mode:
        torch.linalg.lu_factor_ex(singular)
        torch.linalg.det(singular)
        torch.linalg.slogdet(singular)
        for shape in ((3, 5), (5, 3), (0, 3), (0, 0)):
            torch.linalg.lu(torch.randn(shape))
            torch.linalg.lu_factor_ex(torch.randn(shape))
        torch.linalg.inv_ex(torch.randn(0, 3, 3))
        torch.linalg.det(torch.randn(0, 0))
        torch.linalg.solve_ex(torch.randn(2, 0, 0), torch.randn(2, 0, 3))
    assert not mode.failures, mode.failures


def test_without_pivots() -> None:
    """The CPU has no such factorization; the product of its parts is the matrix."""
    torch.manual_seed(0)
    for shape in ((2, 4, 4), (5, 3), (3, 5)):
        a = torch.randn(shape) + 5 * torch.eye(*shape[-2:])
        with jax.enable_x64(True):
            _, lower, upper = lu.lu(to_jax(a), pivot=False)
        torch.testing.assert_close(to_torch(lower) @ to_torch(upper), a, rtol=1e-4, atol=1e-5)
