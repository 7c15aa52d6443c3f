"""Sparse, nested and quantized tensors, which the device does not have: errors with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SPARSE_REMEDY = (
    "Use sparse=False in torch.nn.Embedding and EmbeddingBag, and torch.optim.Adam in place of "
    "SparseAdam: dense gradients are summed on the device. Keep other sparse tensors on the CPU."
)
_SPARSE = ("sparse", SPARSE_REMEDY)
_NESTED = (
    "nested",
    "Make the tensor with layout=torch.jagged, which the device has.",
)
_QUANTIZED = (
    "quantized",
    "Keep integers and scales in tensors of their own (torch._int_mm, tpu_kernels), or simulate "
    "quantization: torch.fake_quantize_per_tensor_affine.",
)
_libraries: list[torch.library.Library] = []


def refuse_sparse() -> None:
    """Have every op that makes or takes a sparse tensor on ``tpu`` raise `UnsupportedOpError`."""
    _refuse("SparsePrivateUse1", *_SPARSE)


def refuse_others() -> None:
    """The same for other layouts: once the device starts, as each takes 4 ms."""
    _refuse("SparseCsrPrivateUse1", *_SPARSE)
    _refuse("NestedTensorPrivateUse1", *_NESTED)
    _refuse("QuantizedPrivateUse1", *_QUANTIZED)


def _refuse(key: str, kind: str, remedy: str) -> None:
    library = torch.library.Library("_", "IMPL", key)
    library.fallback(_raises(kind, remedy))
    _libraries.append(library)  # it is undone when this is freed


def _raises(kind: str, remedy: str) -> Callable[..., Any]:
    def fail(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        from tpu_core import _C
        from tpu_core.errors import UnsupportedOpError

        raise UnsupportedOpError(
            f"{op} is about a {kind} tensor, and device 'tpu' has none.",
            line=_C.user_line() or None,
            remedy=remedy,
        )

    return fail
