"""Sparse, nested and quantized tensors: kernels of sparse ones, errors with a remedy for others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tpu_core import _C

_NESTED = (
    "nested",
    "Make the tensor with layout=torch.jagged, which the device has.",
)
# Ops that make a nested tensor of dense ones. PyTorch ends the process where one that needs
# gradients has no kernel for its size.
_NESTINGS = (
    "_nested_tensor_from_tensor_list",
    "_nested_tensor_from_mask",
    "_nested_from_padded",
    "_nested_view_from_buffer",
)
_QUANTIZED = (
    "quantized",
    "Keep integers and scales in tensors of their own (torch._int_mm, tpu_kernels), or simulate "
    "quantization: torch.fake_quantize_per_tensor_affine.",
)
# Ops that make a quantized tensor of a dense one.
_QUANTIZATIONS = (
    "quantize_per_tensor",
    "quantize_per_tensor.tensor_qparams",
    "quantize_per_tensor_dynamic",
    "quantize_per_channel",
    "_empty_affine_quantized",
    "_empty_per_channel_affine_quantized",
    "_make_per_tensor_quantized_tensor",
    "_make_per_channel_quantized_tensor",
)
_libraries: list[torch.library.Library] = []


def register_sparse() -> None:
    """Have `tpu_core.sparse` run every op of COO tensors; it is imported at the first one."""
    _register("SparsePrivateUse1", "call_coo")


def register_others() -> None:
    """Compressed tensors, conversions of dense ones; ops of nested and quantized tensors raise.

    Runs once the device starts, as a fallback of a dispatch key takes 4 ms.
    """
    # `dispatch` registers kernels: without them the first op of a compressed tensor that has a
    # kernel for all backends takes that one, which precedes a fallback.
    from tpu_core.sparse import conversions, dispatch  # noqa: F401

    _register("SparseCsrPrivateUse1", "call_compressed")
    dense = torch.library.Library("aten", "IMPL", "PrivateUse1")
    _C.share_kernels("PrivateUse1", "CPU", sorted(conversions.SHARED))
    for name in conversions.KERNELS:
        dense.impl(name, _kernel("call_conversion", _overload(name)))
    for name in _NESTINGS:
        dense.impl(name, functools.partial(_raises(*_NESTED), _overload(name)))
    for name in _QUANTIZATIONS:
        dense.impl(name, functools.partial(_raises(*_QUANTIZED), _overload(name)))
    _libraries.append(dense)
    _refuse("NestedTensorPrivateUse1", *_NESTED)
    _refuse("QuantizedPrivateUse1", *_QUANTIZED)


def _register(key: str, function: str) -> None:
    library = torch.library.Library("_", "IMPL", key)
    library.fallback(_kernel(function))
    _libraries.append(library)


def _overload(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _kernel(function: str, *first: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        from tpu_core.sparse import dispatch

        return getattr(dispatch, function)(*first, *args, **kwargs)

    return kernel


def _refuse(key: str, kind: str, remedy: str) -> None:
    library = torch.library.Library("_", "IMPL", key)
    library.fallback(_raises(kind, remedy))
    _libraries.append(library)  # it is undone when this is freed


def _raises(kind: str, remedy: str) -> Callable[..., Any]:
    def fail(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        from tpu_core.errors import UnsupportedOpError

        raise UnsupportedOpError(
            f"{op} is about a {kind} tensor, and device 'tpu' has none.",
            line=_C.user_line() or None,
            remedy=remedy,
        )

    return fail
