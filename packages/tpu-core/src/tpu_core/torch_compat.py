"""Differences between the supported releases of torch. Each branch names the release it is for,
and goes with it; that of the extension is ``csrc/runtime/torch_compat.h``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Dtypes that XLA does not have; the second comes with torch 2.15, for bfloat16 and complex numbers.
HALF_COMPLEX = (torch.complex32, getattr(torch, "bcomplex32", torch.complex32))

_MINOR = tuple(int(n) for n in torch.__version__.split(".")[:2])

# Numbers beyond the range of float8_e4m3fn are 448 or -448 from torch 2.13 on at the latest, and
# NaN in torch 2.11.
FLOAT8_SATURATES = _MINOR >= (2, 13)


def name_profiler_activity(name: str) -> None:
    """Give the profiler's activity of the device its name, as renaming does from torch 2.13 on."""
    from torch._C._profiler import ProfilerActivity

    if not hasattr(ProfilerActivity, name):  # torch 2.11
        setattr(ProfilerActivity, name, ProfilerActivity.PrivateUse1)


def mark_started() -> None:
    """Have ``torch.accelerator.synchronize`` act, now that the device has started."""
    if _MINOR >= (2, 13):
        return
    # torch 2.11: it does nothing until the device's module has been asked to start itself.
    module: Any = torch.get_device_module("tpu")
    if not hasattr(module, "_lazy_init"):
        module._lazy_init = lambda: None
    torch.accelerator.current_device_index()


def complete_meta_functions() -> None:
    """Register the meta functions that torch 2.11 lacks."""
    name = "_scaled_dot_product_fused_attention_overrideable_backward"
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
        return

    def gradients(grad: Any, q: Any, k: Any, v: Any, bias: Any, *_: Any, **__: Any) -> Any:
        like = torch.empty_like
        return like(q), like(k), like(v), None if bias is None else like(bias)

    _LIBRARIES.append(library := torch.library.Library("aten", "IMPL", "Meta"))
    library.impl(name, gradients)


def stricter_meta_functions() -> dict[str, Callable[..., Any]]:
    """Meta functions, by overload, that check what those of torch 2.11 let through."""
    if _MINOR >= (2, 13):
        return {}

    def embedding(weight: torch.Tensor, indices: torch.Tensor, *_: Any) -> torch.Tensor:
        right = indices.dtype in (torch.int64, torch.int32)
        torch._check(right, lambda: f"Indices of an embedding are not {indices.dtype}")
        return torch.ops.aten.embedding.default(weight, indices)

    def weight_int8pack_mm(
        x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        fits = weight.size(1) == x.size(1) and scales.shape == weight.shape[:1]
        torch._check(fits, lambda: f"{x.shape} by {weight.shape} with {scales.shape}")
        return torch.ops.aten._weight_int8pack_mm.default(x, weight, scales)

    return {
        "aten.embedding.default": embedding,
        "aten._weight_int8pack_mm.default": weight_int8pack_mm,
    }


# Registrations end with their library objects.
_LIBRARIES: list[torch.library.Library] = []
