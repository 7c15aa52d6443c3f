"""The kernel of every op that takes or makes a sparse tensor on device ``tpu``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from tpu_core import _C
from tpu_core.sparse import compressed, conversions, coo, cpu

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
        "add.Tensor add_.Tensor cat clone conj_physical.out copy_ copy_sparse_to_sparse_ dense_dim "
        "empty.memory_format empty_like floor_divide.out indices "
        "is_coalesced mm mm.out mv narrow_copy native_norm "
        "native_norm.ScalarOpt_dim_dtype norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype permute "
        "pow.Tensor_Scalar pow.Tensor_Scalar_out resize_as_sparse_ sparse_dim "
        "sparse_resize_ sparse_resize_and_clear_ sub.Tensor sub_.Tensor sub.out sum "
        "sum.dim_IntList threshold_backward threshold_backward.grad_input unsqueeze values "
        "view_as_complex view_as_real zero_ zeros.out any _to_sparse _to_sparse.sparse_dim "
        "_to_sparse_csr _to_sparse_csc"
    ).split()
)

# CPU kernels compute these on the same memory in the default tiers: a sparse optimizer's step
# makes ten such calls a table, each of which is ten of dense ops.
_OF_GRADIENTS = ("_coalesce", "add.out", "sparse_mask")

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
    return _call(op, args, kwargs, coo.KERNELS, _SHARED_COO, DispatchKey.SparseCPU)


def call_compressed(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run ``op``, an op of the dispatch key ``SparseCsrPrivateUse1``."""
    return _call(op, args, kwargs, compressed.KERNELS, _SHARED_COMPRESSED, DispatchKey.SparseCsrCPU)


def call_conversion(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run ``op``, which works on the indices of a compressed tensor."""
    return _call(op, args, kwargs, conversions.KERNELS, frozenset(), DispatchKey.CPU)


def _call(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kernels: dict[str, Callable[..., Any]],
    shared: frozenset[str],
    source: DispatchKey,
) -> Any:
    name = op._schema.name.removeprefix("aten::")
    if op._overloadname != "default":
        name += "." + op._overloadname
    kernel = kernels.get(name)
    if kernel is not None:
        result = kernel(*args, **kwargs)
        if result is not NotImplemented:
            return result
    elif name in shared:  # the call that imported this module
        return op.redispatch(DispatchKeySet(source), *args, **kwargs)
    return cpu.run(op, args, kwargs)


def _register(
    key: str,
    call: Callable[..., Any],
    kernels: dict[str, Callable[..., Any]],
    source: str,
    shared: frozenset[str],
) -> None:
    """Register ``kernels`` at ``key``, and those that the ops ``shared`` have at ``source``.

    Some ops have a kernel for all backends that raises, and that precedes a fallback.
    """
    library = torch.library.Library("aten", "IMPL", key)
    for name in kernels:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is None:  # torch 2.11 lacks a few
            continue
        kernel = functools.partial(call, op)
        if key == "SparsePrivateUse1" and name in _OF_GRADIENTS:
            _C.register_sparse_gradients(name, functools.partial(_apply, kernel))
        else:
            library.impl(name, kernel)
    _libraries.append(library)
    _C.share_kernels(key, source, sorted(shared - set(kernels)))


def _apply(kernel: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    return kernel(*args, **kwargs)


_libraries: list[torch.library.Library] = []
_register("SparsePrivateUse1", call_coo, coo.KERNELS, "SparseCPU", _SHARED_COO)
_register(
    "SparseCsrPrivateUse1",
    call_compressed,
    compressed.KERNELS,
    "SparseCsrCPU",
    _SHARED_COMPRESSED,
)
