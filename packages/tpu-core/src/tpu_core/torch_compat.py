"""Differences between the supported releases of torch. Each branch names the release it is for,
and goes with it; that of the extension is ``csrc/runtime/torch_compat.h``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


class _MetaOfCpu(threading.local):
    """Device for which tensors on ``meta`` stand in this thread: the CPU, or what PyTorch takes."""

    is_meant = False


_meta_of_cpu = _MetaOfCpu()


@contextmanager
def meta_of_cpu() -> Iterator[None]:
    """Have PyTorch's meta functions give the strides of CPU kernels, where they give a GPU's else.

    The functions ask for the device that a tensor stands for, and take a GPU for the device of one
    that says nothing.
    """
    before, _meta_of_cpu.is_meant = _meta_of_cpu.is_meant, True
    try:
        yield
    finally:
        _meta_of_cpu.is_meant = before


def name_device_of_meta() -> None:
    """Make `meta_of_cpu` known to PyTorch; fake tensors of the device stand for the CPU's."""
    import torch._meta_registrations as functions

    asked = functions.device_hint

    def device_hint(tensor: torch.Tensor) -> str:
        hint = asked(tensor)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return hint  # more ops have integers on a GPU, as `histc`
        is_of_cpu = _meta_of_cpu.is_meant and tensor.device.type == "meta"
        return "cpu" if is_of_cpu or hint == "tpu" else hint

    functions.device_hint = device_hint


def convolution_format(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.memory_format:
    """Memory format of the results of a convolution of CPU tensors, whose values are not read."""
    parameters = (stride, padding, dilation, transposed, output_padding, groups)
    backend = torch._C._select_conv_backend(x, weight, None, *parameters, None)
    if x.dim() == 3:
        x, weight = x.contiguous().unsqueeze(2), weight.unsqueeze(2)
    return torch._C._conv_determine_backend_memory_format(x, weight, backend)


# Registrations end with their library objects.
_LIBRARIES: list[torch.library.Library] = []
