"""Kernels of COO tensors whose CPU versions in ATen read memory of the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_SPARSE = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)


def flat_indices(x: Tensor) -> Tensor:
    """Row-major index of each element of ``x`` among its sparse dims: (nnz,), int64."""
    return flatten(x._indices(), x.shape[: x.sparse_dim()])


def flatten(indices: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Row-major index of each column of ``indices``, (dims, nnz): (nnz,), int64."""
    if len(sizes) == 1:
        return indices[0]
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    flat = torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    for row, stride in zip(indices, strides, strict=True):
        flat = flat + row * stride
    return flat


def unflatten(flat: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Indices, (dims, nnz), of row-major indices ``flat``, (nnz,)."""
    rows = []
    for size in reversed(sizes):
        rows.append(flat % size)
        flat = flat // size
    return torch.stack(rows[::-1]) if rows else flat.new_empty(0, len(flat))


def make(indices: Tensor, values: Tensor, size: tuple[int, ...], coalesced: bool) -> Tensor:
    """A COO tensor of ``indices``, (sparse dims, nnz), and ``values``, (nnz, *dense dims)."""
    return torch.sparse_coo_tensor(
        indices, values, size, check_invariants=False, is_coalesced=coalesced
    )


def coalesce(x: Tensor) -> Tensor:
    """``aten::_coalesce``: equal indices summed, in row-major order. Reads the number of them."""
    if x._nnz() < 2:
        return x.clone()._coalesced_(True)
    sizes, values = tuple(x.shape[: x.sparse_dim()]), x._values()
    if not sizes:
        flat = torch.zeros(len(values), dtype=torch.int64, device=x.device)
    else:
        flat = flat_indices(x)
    found, inverse = torch.unique(flat, return_inverse=True)
    total = values.new_zeros(len(found), *values.shape[1:])
    if values.dtype == torch.bool:
        summed = total.to(torch.int32).index_add_(0, inverse, values.to(torch.int32)) != 0
    else:
        summed = total.index_add_(0, inverse, values)
    return make(unflatten(found, sizes), summed, tuple(x.shape), True)


def add_out(self: Any, other: Any, *, alpha: Any = 1, out: Tensor) -> Any:
    """``aten::add.out`` of two sparse tensors, or of a dense and a sparse one."""
    if out is self and _adds_rows(self, other, alpha):
        values = other._values()
        values = values if alpha == 1 else values * alpha
        # On the CPU in half the time of index_add_.
        return out.index_put_((other._indices()[0],), values, accumulate=True)
    if not isinstance(self, Tensor) or not isinstance(other, Tensor):
        return NotImplemented  # PyTorch's error for a number
    dtype = torch.result_type(self, other)
    if not torch.can_cast(dtype, out.dtype) or (
        isinstance(alpha, complex) and not dtype.is_complex
    ):
        return NotImplemented  # PyTorch's error
    if not (dtype.is_floating_point or dtype.is_complex):
        alpha = bool(alpha) if dtype == torch.bool else int(alpha)  # as in ATen
    if not self.is_sparse:
        return _add_to_dense(self, other, alpha, dtype, out)
    if not other.is_sparse:
        raise RuntimeError(_NO_DENSE)
    if self.shape != other.shape:
        raise RuntimeError(
            f"add: expected sizes of 'self' and 'other' to match, but {list(self.shape)} != "
            f"{list(other.shape)}"
        )
    if self.sparse_dim() != other.sparse_dim():
        raise RuntimeError(
            f"add: expected 'self' and 'other' to have same number of sparse dimensions, but "
            f"{self.sparse_dim()} != {other.sparse_dim()}"
        )
    both = self.is_coalesced() and other.is_coalesced()
    scaled = other._values().to(dtype) * alpha
    values = torch.cat([self._values().to(dtype), scaled.to(dtype)])
    total = make(
        torch.cat([self._indices(), other._indices()], 1), values, tuple(self.shape), False
    )
    return _store(out, total.coalesce() if both else total)


def _adds_rows(dense: Any, x: Any, alpha: Any) -> bool:
    """Return whether ``x`` is a gradient of some rows of ``dense``, times ``alpha``."""
    return (
        isinstance(dense, Tensor)
        and isinstance(x, Tensor)
        and not dense.is_sparse
        and dense.dtype == x.dtype
        and dense.is_floating_point()
        and not isinstance(alpha, complex)
        and dense.shape == x.shape
        and x.sparse_dim() == 1
    )


def _add_to_dense(dense: Tensor, x: Tensor, alpha: Any, dtype: torch.dtype, out: Tensor) -> Tensor:
    if dense.shape != x.shape:
        raise RuntimeError(
            f"add: expected 'self' and 'other' to have same size, but self has size "
            f"{list(dense.shape)} while other has size {list(x.shape)} (FYI: dense-sparse addition "
            "does not currently support broadcasting)"
        )
    if out.shape != dense.shape:
        out.resize_(dense.shape)
    total = out if out.dtype == dtype else out.new_empty(out.shape, dtype=dtype)
    if total is not dense:
        total.copy_(dense)
    values = x._values().to(dtype)
    values = values if alpha == 1 else (values * alpha).to(dtype)
    if x.sparse_dim() == 0:
        total.add_(values.sum(0))
    elif dtype == torch.bool:
        total.logical_or_(_dense_of(x, values))
    else:
        total.index_put_(tuple(x._indices()), values, accumulate=True)
    return out if total is out else out.copy_(total)


def _dense_of(x: Tensor, values: Tensor) -> Tensor:
    counts = torch.zeros(x.shape, dtype=torch.int32, device=x.device)
    return counts.index_put_(tuple(x._indices()), values.to(torch.int32), accumulate=True) != 0


def mul_out(self: Any, other: Any, *, out: Tensor) -> Any:
    """``aten::mul.out``; of two sparse tensors, those of equal indices. Reads their number."""
    if not isinstance(self, Tensor) or not isinstance(other, Tensor):
        return _store(out, self * other)
    if not (self.is_sparse and other.is_sparse) or 0 in (self.dim(), other.dim()):
        return torch.ops.aten.mul.out.redispatch(_SPARSE, self, other, out=out)
    if self.shape != other.shape or self.sparse_dim() != other.sparse_dim():
        return NotImplemented  # broadcasts, and PyTorch's own errors
    dtype = torch.result_type(self, other)
    _require_cast(dtype, out.dtype)
    a, b = self.coalesce(), other.coalesce()
    left, right = flat_indices(a), flat_indices(b)
    if a._nnz() and b._nnz():
        place = torch.searchsorted(right, left).clamp(max=len(right) - 1)
        kept = (right[place] == left).nonzero()[:, 0]
    else:
        kept = place = left[:0]
    values = a._values().to(dtype)[kept] * b._values().to(dtype)[place[kept]]
    both = self.is_coalesced() and other.is_coalesced()
    return _store(out, make(a._indices()[:, kept], values, tuple(self.shape), both))


def sparse_mask(self: Tensor, mask: Tensor) -> Any:
    """``aten::sparse_mask``: elements of ``self``, sparse or dense, at the indices of ``mask``."""
    if self.is_sparse and mask.is_sparse:
        return sparse_mask_projection(self, mask)
    if self.layout != torch.strided or self.shape != mask.shape or not mask.sparse_dim():
        return torch.ops.aten.sparse_mask.default.redispatch(_SPARSE, self, mask)
    indices = mask._indices()
    if len(indices) == 1:
        values = self.index_select(0, indices[0])
    else:
        values = self[tuple(indices)]
    return make(indices.clone(), values, tuple(mask.shape), mask.is_coalesced())


def sparse_mask_projection(self: Tensor, mask: Tensor, accumulate_matches: bool = False) -> Tensor:
    """``aten::_sparse_mask_projection``: the elements of ``self`` at the indices of ``mask``."""
    if accumulate_matches or self.shape != mask.shape or self.sparse_dim() != mask.sparse_dim():
        return NotImplemented
    x = self.coalesce()
    if not x._nnz() or not mask._nnz():
        values = x._values().new_zeros(mask._nnz(), *x._values().shape[1:])
    else:
        present, wanted = flat_indices(x), flat_indices(mask)
        place = torch.searchsorted(present, wanted).clamp(max=len(present) - 1)
        hit = present[place] == wanted
        found = x._values()[place]
        values = torch.where(hit.view(-1, *[1] * (found.dim() - 1)), found, 0)
    return make(mask._indices().clone(), values, tuple(mask.shape), mask.is_coalesced())


def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """``aten::addmm`` of a sparse and a dense matrix."""
    if not mat1.is_sparse or mat1.dense_dim() or mat2.layout != torch.strided:
        return NotImplemented
    if self.layout != torch.strided or len({x.dtype for x in (self, mat1, mat2)}) > 1:
        return NotImplemented
    if mat2.dim() != 2 or mat1.shape[1] != mat2.shape[0]:
        return NotImplemented
    rows, columns = mat1._indices()
    total = _scaled(self.expand(mat1.shape[0], mat2.shape[1]), beta)
    product = mat1._values()[:, None] * mat2.index_select(0, columns)
    return total.index_add_(0, rows, product if alpha == 1 else product * alpha)


def addmm_out(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor
) -> Any:
    """``aten::addmm.out`` of a sparse and a dense matrix."""
    return into(out, addmm(self, mat1, mat2, beta=beta, alpha=alpha))


def addmm_(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """``aten::addmm_`` of a sparse and a dense matrix."""
    return addmm_out(self, mat1, mat2, beta=beta, alpha=alpha, out=self)


def bmm(self: Tensor, mat2: Tensor) -> Any:
    """``aten::bmm`` of a batch of sparse matrices and one of dense matrices."""
    if not self.is_sparse or self.dense_dim() or mat2.layout != torch.strided:
        return NotImplemented
    if (self.dim(), mat2.dim()) != (3, 3) or self.dtype != mat2.dtype:
        return NotImplemented
    if self.shape[0] != mat2.shape[0] or self.shape[2] != mat2.shape[1]:
        return NotImplemented
    batch, rows, columns = self._indices()
    product = self._values()[:, None] * mat2[batch, columns]
    total = mat2.new_zeros(self.shape[0] * self.shape[1], mat2.shape[2])
    total.index_add_(0, batch * self.shape[1] + rows, product)
    return total.view(self.shape[0], self.shape[1], mat2.shape[2])


def bmm_out(self: Tensor, mat2: Tensor, *, out: Tensor) -> Any:
    """``aten::bmm.out`` of a batch of sparse matrices and one of dense matrices."""
    return into(out, bmm(self, mat2))


def into(out: Tensor, result: Any) -> Any:
    """``out``, resized and filled with a dense ``result``; `NotImplemented` where that is one."""
    if result is NotImplemented or out.layout != torch.strided:
        return NotImplemented
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def _scaled(x: Tensor, beta: Any) -> Tensor:
    # Elements of `self` do not count where beta is 0, not even NaN: as in torch.addmm.
    return torch.zeros_like(x).contiguous() if beta == 0 else (x * beta).contiguous()


def _store(out: Tensor, result: Tensor) -> Tensor:
    if out.dtype != result.dtype:
        result = make(
            result._indices(),
            result._values().to(out.dtype),
            tuple(result.shape),
            result.is_coalesced(),
        )
    out.sparse_resize_and_clear_(result.shape, result.sparse_dim(), result.dense_dim())
    return out.copy_(result)


def _require_cast(dtype: torch.dtype, out: torch.dtype) -> None:
    if not torch.can_cast(dtype, out):
        a, b = (str(x).removeprefix("torch.") for x in (dtype, out))
        raise RuntimeError(f"result type {a} can't be cast to the desired output type {b}")


def by_number(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """A product or quotient: a number, which the dispatcher unwraps, acts on the values.

    Other operands take ATen's kernel.
    """

    def kernel(self: Any, other: Any, **kwargs: Any) -> Any:
        if isinstance(self, Tensor) and isinstance(other, Tensor):
            return op.redispatch(_SPARSE, self, other, **kwargs)
        if not isinstance(self, Tensor):
            self, other = other, self  # a product
        linear = kwargs.get("rounding_mode") is None and "floor" not in op._schema.name
        if "out" in kwargs:
            return _store(kwargs.pop("out"), kernel(self, other, **kwargs))
        if op._schema.is_mutable:
            if op is _aten.mul_.Tensor:  # ATen gives it other values
                values = self._values() * other
                if values.dtype != self.dtype:
                    return NotImplemented  # PyTorch's error
                return _store(self, make(self._indices(), values, tuple(self.shape), False))
            if not linear and not self.is_coalesced():
                self.copy_(self.coalesce())
            op(self._values(), other, **kwargs)
            return self
        x = self if linear else self.coalesce()
        values = op(x._values(), other, **kwargs)
        return make(x._indices().clone(), values, tuple(x.shape), x.is_coalesced())

    return kernel


_NO_DENSE = "add(sparse, dense) is not supported. Use add(dense, sparse) instead."

KERNELS: dict[str, Callable[..., Any]] = {
    "mul.Tensor": by_number(_aten.mul.Tensor),
    "mul_.Tensor": by_number(_aten.mul_.Tensor),
    "div.Tensor": by_number(_aten.div.Tensor),
    "div_.Tensor": by_number(_aten.div_.Tensor),
    "div.Tensor_mode": by_number(_aten.div.Tensor_mode),
    "div_.Tensor_mode": by_number(_aten.div_.Tensor_mode),
    "div.out": by_number(_aten.div.Tensor),
    "div.out_mode": by_number(_aten.div.Tensor_mode),
    "floor_divide": by_number(_aten.floor_divide.default),
    "floor_divide_.Tensor": by_number(_aten.floor_divide_.Tensor),
    "sparse_mask": sparse_mask,
    "_coalesce": coalesce,
    "_sparse_mask_projection": sparse_mask_projection,
    "add.out": add_out,
    "addmm": addmm,
    "addmm.out": addmm_out,
    "addmm_": addmm_,
    "bmm": bmm,
    "bmm.out": bmm_out,
    "mul.out": mul_out,
}
