"""Error for sparse tensors, which the device does not support."""

from __future__ import annotations

from typing import Any

import torch

REMEDY = (
    "Use sparse=False in torch.nn.Embedding and EmbeddingBag, and torch.optim.Adam in place of "
    "SparseAdam: dense gradients are summed on the device. Keep other sparse tensors on the CPU."
)
_libraries: list[torch.library.Library] = []


def refuse() -> None:
    """Have every op that makes or takes a sparse tensor on ``tpu`` raise `UnsupportedOpError`."""
    library = torch.library.Library("_", "IMPL", "SparsePrivateUse1")
    library.fallback(_raise)
    _libraries.append(library)  # it is undone when this is freed


def _raise(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    from tpu_core import _C
    from tpu_core.errors import UnsupportedOpError

    raise UnsupportedOpError(
        f"{op} is about a sparse tensor, and device 'tpu' has none.",
        line=_C.user_line() or None,
        remedy=REMEDY,
    )
