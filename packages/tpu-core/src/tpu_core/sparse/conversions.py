"""Kernels of dense tensors that make sparse ones, and of the indices of compressed tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpu_core.sparse import coo
from tpu_core.sparse.compressed import rows_of

# ATen/native/{TensorConversions,sparse/SparseTensor}.cpp: calls of nonzero, index and conversions.
SHARED = frozenset(
    "_to_sparse _to_sparse.sparse_dim _to_sparse_csr _to_sparse_csc _to_sparse_bsr "
    "_to_sparse_bsc".split()
)


def coo_to_csr(indices: Tensor, size: int, *, out_int32: bool = False) -> Tensor:
    """``aten::_convert_indices_from_coo_to_csr``: starts, (size + 1,), of sorted rows, (nnz,)."""
    starts = torch.arange(size + 1, device=indices.device, dtype=indices.dtype)
    return torch.searchsorted(indices.contiguous(), starts, out_int32=out_int32)


def coo_to_csr_out(indices: Tensor, size: int, *, out_int32: bool = False, out: Tensor) -> Tensor:
    """``aten::_convert_indices_from_coo_to_csr.out``."""
    return coo.into(out, coo_to_csr(indices, size, out_int32=out_int32))


def csr_to_coo(
    crow: Tensor, col: Tensor, *, out_int32: bool = False, transpose: bool = False
) -> Any:
    """``aten::_convert_indices_from_csr_to_coo``: rows and columns, (2, nnz)."""
    if crow.dim() != 1:
        return NotImplemented
    dtype = torch.int32 if out_int32 else torch.int64
    rows, columns = rows_of(crow, len(col)).to(dtype), col.to(dtype)
    return torch.stack([columns, rows] if transpose else [rows, columns])


def csr_to_coo_out(
    crow: Tensor, col: Tensor, *, out_int32: bool = False, transpose: bool = False, out: Tensor
) -> Any:
    """``aten::_convert_indices_from_csr_to_coo.out``."""
    return coo.into(out, csr_to_coo(crow, col, out_int32=out_int32, transpose=transpose))


KERNELS: dict[str, Callable[..., Any]] = {
    "_convert_indices_from_coo_to_csr": coo_to_csr,
    "_convert_indices_from_coo_to_csr.out": coo_to_csr_out,
    "_convert_indices_from_csr_to_coo": csr_to_coo,
    "_convert_indices_from_csr_to_coo.out": csr_to_coo_out,
}
