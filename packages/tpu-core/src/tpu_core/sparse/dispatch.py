"""The kernel of every op that takes or makes a sparse tensor on device ``tpu``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from tpu_core.sparse import compressed, conversions, coo, cpu

_COO = DispatchKeySet(DispatchKey.SparseCPU)
_COMPRESSED = DispatchKeySet(DispatchKey.SparseCsrCPU)
_DENSE = DispatchKeySet(DispatchKey.CPU)

_ELEMENTWISE = (
    "abs asin asinh atan atanh ceil deg2rad erf erfinv expm1 floor frac isinf isnan isneginf "
    "isposinf log1p nan_to_num neg rad2deg relu round sgn sign signbit sin sinh sqrt tan tanh trunc"
).split()

# Kernels of ATen/native/sparse/{SparseTensor,SparseUnaryOps,SparseTensorMath}.cpp that only
# call ops on indices and values, or on sparse tensors again.
_SHARED_COO = frozenset(
    [name + suffix for name in _ELEMENTWISE for suffix in ("", "_", ".out")]
    + (
        "_coalesced_ _dimI _dimV _indices _nnz _sparse_broadcast_to "
        "_sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors _to_dense _values "
        "cat clone conj_physical.out copy_ copy_sparse_to_sparse_ dense_dim "
        ""
        "empty.memory_format empty_like floor_divide.out indices "
        "is_coalesced mm mm.out mv narrow_copy native_norm "
        "native_norm.ScalarOpt_dim_dtype norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype permute "
        "pow.Tensor_Scalar pow.Tensor_Scalar_out resize_as_sparse_ sparse_dim "
        "sparse_resize_ sparse_resize_and_clear_ sub.out sum "
        "sum.dim_IntList threshold_backward threshold_backward.grad_input unsqueeze values "
        "view_as_complex view_as_real zero_ zeros.out any _to_sparse _to_sparse.sparse_dim "
        "_to_sparse_csr _to_sparse_csc"
    ).split()
)

# The same of ATen/native/sparse/SparseCsrTensor{,Math}.cpp.
_SHARED_COMPRESSED = frozenset(
    [name + suffix for name in _ELEMENTWISE for suffix in ("", "_", ".out")]
    + (
        "_conj_physical _nnz _to_dense add.Tensor add_.Tensor angle angle.out ccol_indices clone "
        "col_indices conj_physical.out conj_physical_ copy_ crow_indices dense_dim "
        "empty.memory_format empty_like fill_.Scalar mm mul.Scalar mul_.Scalar normal_ "
        "resize_ resize_as_sparse_ row_indices sparse_dim sum "
        "threshold_backward threshold_backward.grad_input values zero_ _to_sparse "
        "_to_sparse.sparse_dim select.int"
    ).split()
)


def call_coo(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run ``op``, an op of the dispatch key ``SparsePrivateUse1``."""
    return _call(op, args, kwargs, coo.KERNELS, _SHARED_COO, _COO)


def call_compressed(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run ``op``, an op of the dispatch key ``SparseCsrPrivateUse1``."""
    return _call(op, args, kwargs, compressed.KERNELS, _SHARED_COMPRESSED, _COMPRESSED)


def call_conversion(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run ``op``, which makes a sparse tensor of a dense one or works on the indices of one."""
    return _call(op, args, kwargs, conversions.KERNELS, conversions.SHARED, _DENSE)


def _call(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    own: dict[str, Callable[..., Any]],
    shared: frozenset[str],
    key: DispatchKeySet,
) -> Any:
    name = op._schema.name.removeprefix("aten::")
    if op._overloadname != "default":
        name += "." + op._overloadname
    kernel = own.get(name)
    if kernel is not None:
        result = kernel(*args, **kwargs)
        if result is not NotImplemented:
            return result
    elif name in shared:
        return op.redispatch(key, *args, **kwargs)
    return cpu.run(op, args, kwargs)


def _register(key: str, call: Callable[..., Any], names: Iterable[str]) -> None:
    """Give ``names`` a kernel at ``key``.

    Some have a kernel for all backends that raises, and that precedes a fallback.
    """
    library = torch.library.Library("aten", "IMPL", key)
    for name in names:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is not None:  # torch 2.11 lacks a few
            library.impl(name, functools.partial(call, op))
    _libraries.append(library)


_libraries: list[torch.library.Library] = []
_register("SparsePrivateUse1", call_coo, sorted(_SHARED_COO | set(coo.KERNELS)))
_register(
    "SparseCsrPrivateUse1", call_compressed, sorted(_SHARED_COMPRESSED | set(compressed.KERNELS))
)
