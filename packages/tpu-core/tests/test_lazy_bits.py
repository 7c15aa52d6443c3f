"""Operands with PyTorch's lazy conjugate or negative bit, which products of matrices are given."""

from __future__ import annotations

import pytest
import torch

LAZY = {"conj": torch.conj, "neg": torch._neg_view}
OPS = {
    "dot": (torch.dot, [(4,), (4,)]),
    "vdot": (torch.vdot, [(4,), (4,)]),
    "mv": (torch.mv, [(3, 4), (4,)]),
    "mm": (torch.mm, [(2, 3), (3, 4)]),
    "addmm": (torch.addmm, [(2, 4), (2, 3), (3, 4)]),
    "bmm": (torch.bmm, [(2, 2, 3), (2, 3, 4)]),
    "baddbmm": (torch.baddbmm, [(2, 2, 4), (2, 2, 3), (2, 3, 4)]),
    "linear": (torch.nn.functional.linear, [(2, 3), (4, 3)]),
    "solve_triangular": (
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
        [(3, 3), (3, 2)],
    ),
}


def complex_tensors(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.complex64) for shape in shapes]


@pytest.mark.parametrize("bit", LAZY)
@pytest.mark.parametrize("name", OPS)
def test_operands(name: str, bit: str) -> None:
    fn, shapes = OPS[name]
    given = complex_tensors(shapes)
    for lazy in range(len(given)):

        def call(device: str, lazy: int = lazy) -> torch.Tensor:
            moved = [x.to(device) for x in given]
            moved[lazy] = LAZY[bit](moved[lazy])
            return fn(*moved)

        torch.testing.assert_close(call("tpu").cpu(), call("cpu"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bit", LAZY)
def test_results_are_written_through_lazy_views(bit: str) -> None:
    a, b, c = complex_tensors([(3, 3)] * 3)

    def call(device: str) -> list[torch.Tensor]:
        x, y, z = a.to(device), b.to(device), c.to(device)
        view = LAZY[bit](x)
        assert view.addmm_(y, z) is view
        out = LAZY[bit](torch.zeros_like(y))
        return [x, view, torch.mm(y, z.mH, out=out)]

    for got, want in zip(call("tpu"), call("cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)


def test_gradients_of_a_hermitian_product() -> None:
    a, b = complex_tensors([(3, 4), (3, 2)])

    def gradients(device: str) -> list[torch.Tensor]:
        x, y = (t.to(device).requires_grad_() for t in (a, b))
        (x.mH @ y).abs().sum().backward()
        return [x.grad.cpu(), y.grad.cpu()]

    for got, want in zip(gradients("tpu"), gradients("cpu"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_conjugates_that_are_written() -> None:
    (a,) = complex_tensors([(3, 4)])

    def call(device: str) -> list[torch.Tensor]:
        x = a.to(device).requires_grad_()
        y = (x * 2).conj_physical_()
        (y * y).abs().sum().backward()
        out = torch.empty(0, dtype=torch.complex64, device=device)
        torch.conj_physical(x.detach(), out=out)
        return [y.detach(), x.grad, out, torch.ones(2, device=device).conj_physical_()]

    for got, want in zip(call("tpu"), call("cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
