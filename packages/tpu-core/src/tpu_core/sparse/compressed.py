"""Kernels of compressed tensors whose CPU versions in ATen read memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpu_core.sparse import coo, cpu


def rows_of(crow: Tensor, count: int) -> Tensor:
    """Row of each of ``count`` elements by the starts ``crow``, (rows + 1,): (count,), int64."""
    elements = torch.arange(count, device=crow.device, dtype=crow.dtype)
    return torch.searchsorted(crow.contiguous(), elements, right=True) - 1


def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """``aten::addmm`` of a CSR and a dense matrix."""
    if mat1.layout == torch.strided and mat2.layout == torch.sparse_csc:
        return _transposed(self, mat1, mat2, beta, alpha)
    if mat1.layout != torch.sparse_csr or mat1.dim() != 2 or mat2.layout != torch.strided:
        return NotImplemented
    if mat1.dense_dim():
        return NotImplemented
    rows = rows_of(mat1.crow_indices(), mat1._nnz())
    indices = torch.stack([rows, mat1.col_indices().to(torch.int64)])
    matrix = coo.make(indices, mat1.values(), tuple(mat1.shape), True)
    return coo.addmm(self, matrix, mat2, beta=beta, alpha=alpha)


def _transposed(self: Tensor, mat1: Tensor, mat2: Tensor, beta: Any, alpha: Any) -> Any:
    # (mat1 @ mat2).T is mat2.T @ mat1.T, and the transpose of a CSC matrix is a CSR one.
    if self.dim() != 2:
        self = self.expand(mat1.shape[0], mat2.shape[1])
    result = addmm(self.t(), mat2.transpose(0, 1), mat1.t(), beta=beta, alpha=alpha)
    return result if result is NotImplemented else result.t()


def addmm_out(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor
) -> Any:
    """``aten::addmm.out`` of a CSR and a dense matrix."""
    return coo.into(out, addmm(self, mat1, mat2, beta=beta, alpha=alpha))


def by_number(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """A product by a number acts on the values; other operands take the CPU's kernel."""

    def kernel(self: Any, other: Any) -> Any:
        if isinstance(self, Tensor) and isinstance(other, Tensor):
            if other.dim() or other.layout != torch.strided:
                return NotImplemented
        elif not isinstance(self, Tensor):
            self, other = other, self
        if op._schema.is_mutable:
            op(self.values(), other)
            return self
        return _with_values(self, op(self.values(), other))

    return kernel


def _with_values(x: Tensor, values: Tensor) -> Tensor:
    by_row = x.layout in (torch.sparse_csr, torch.sparse_bsr)
    starts = x.crow_indices() if by_row else x.ccol_indices()
    others = x.col_indices() if by_row else x.row_indices()
    return torch.sparse_compressed_tensor(
        starts.clone(), others.clone(), values, x.shape, layout=x.layout, check_invariants=False
    )


def on_cpu(*args: Any, **kwargs: Any) -> Any:
    """No kernel: the CPU's (PyTorch has one for all backends, which refuses the layout)."""
    return NotImplemented


def addmv_out(
    self: Tensor, mat: Tensor, vec: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor
) -> Any:
    """``aten::addmv.out`` of a CSR matrix and a vector."""
    if self.dim() > 1 or vec.dim() != 1:
        return NotImplemented
    column = self.expand(mat.shape[0])[:, None]
    result = addmm(column, mat, vec[:, None], beta=beta, alpha=alpha)
    return result if result is NotImplemented else coo.into(out, result[:, 0])


def mm_reduce(self: Tensor, other: Tensor, reduce: str) -> Any:
    """``aten::_sparse_mm_reduce_impl``, on the CPU.

    It gives the positions of maxima, which its backward reads without a check, only for operands
    that require gradients.
    """
    op = torch.ops.aten._sparse_mm_reduce_impl.default
    return cpu.run(op, (self, other, reduce), {}, requires_grad=self.dtype.is_floating_point)


KERNELS: dict[str, Callable[..., Any]] = {
    "_sparse_mm_reduce_impl": mm_reduce,
    "add.out": on_cpu,
    "addmm": addmm,
    "addmm.out": addmm_out,
    "addmv.out": addmv_out,
    "mul.Tensor": by_number(torch.ops.aten.mul.Tensor),
    "mul.out": on_cpu,
    "mul_.Tensor": by_number(torch.ops.aten.mul_.Tensor),
    "sparse_mask": on_cpu,
    "sum.dim_IntList": on_cpu,
}
