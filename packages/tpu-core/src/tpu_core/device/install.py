"""Patches of PyTorch where it has no hook for a device."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch

from tpu_core import import_hooks, jagged_attention, layouts, torch_compat


def install() -> None:
    """Set up autocast, printing, forks and the optimizer hook.

    Runs inside ``import torch``: keep it small.
    """
    # PyTorch's default for PrivateUse1 is float16.
    torch.set_autocast_dtype("tpu", torch.bfloat16)
    torch_compat.name_profiler_activity("TPU")
    _print_with_one_transfer()
    _settable_eager_mode()
    _hook_optimizers()
    _average_by_tensor()
    _export_by_dlpack()
    _snapshot_by_accelerator()
    layouts.register_sparse()
    jagged_attention.install()
    import_hooks.finish_before_forks()


def _print_with_one_transfer() -> None:
    """`print(t)` runs dozens of ops; on the host they cost one transfer and no program."""
    from torch import _tensor_str

    original = _tensor_str._tensor_str

    def tensor_str(self: Any, indent: int) -> str:
        if self.device.type == "tpu" and type(self) in (torch.Tensor, torch.nn.Parameter):
            self = self.detach().cpu()
        return original(self, indent)

    _tensor_str._tensor_str = tensor_str


class _DeviceModule(types.ModuleType):
    """Lets ``torch.tpu.eager_mode = "strict"`` act."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "eager_mode":
            from tpu_core import modes

            modes.set_mode(value)
            return
        super().__setattr__(name, value)


def _settable_eager_mode() -> None:
    sys.modules["tpu_core.device"].__class__ = _DeviceModule


def _export_by_dlpack() -> None:
    """PyTorch's own methods know the devices of its builds alone."""
    export, device_of = torch.Tensor.__dlpack__, torch.Tensor.__dlpack_device__

    @functools.wraps(export)
    def __dlpack__(self: torch.Tensor, **options: Any) -> Any:  # noqa: N807
        if self.device.type != "tpu" or torch.overrides.has_torch_function_unary(self):
            return export(self, **options)
        from tpu_core import interop

        return interop.dlpack(self, **options)

    @functools.wraps(device_of)
    def __dlpack_device__(self: torch.Tensor) -> Any:  # noqa: N807
        if self.device.type != "tpu" or torch.overrides.has_torch_function_unary(self):
            return device_of(self)
        from tpu_core import interop

        return interop.dlpack_device(self)

    # mypy has no word for a method that is replaced; PyTorch has no hook for these two.
    torch.Tensor.__dlpack__ = __dlpack__  # type: ignore[method-assign]
    torch.Tensor.__dlpack_device__ = __dlpack_device__  # type: ignore[method-assign]


def _snapshot_by_accelerator() -> None:
    """`torch.accelerator.memory._snapshot` asks CUDA's module for all devices but XPU."""
    original = getattr(torch.accelerator.memory, "_snapshot", None)
    if original is None:  # torch 2.11
        return

    @functools.wraps(original)
    def _snapshot(device: Any = None, augment_with_fx_traces: bool = False) -> Any:
        from tpu_core.device import memory

        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != "tpu":
            return original(device, augment_with_fx_traces=augment_with_fx_traces)
        return memory._snapshot(device, augment_with_fx_traces=augment_with_fx_traces)

    setattr(torch.accelerator.memory, "_snapshot", _snapshot)  # noqa: B010 (mypy minds the other)


def _hook_optimizers() -> None:
    """Cut where an optimizer's step ends, and undo one that finds too little memory."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    register_optimizer_step_pre_hook(_before_optimizer_step)
    register_optimizer_step_post_hook(_after_optimizer_step)


def _average_by_tensor() -> None:
    """`AveragedModel` takes devices with foreach kernels by a path that refuses the integers of a
    batch norm and reads its count on the host; the CPU's has each tensor by itself.
    """
    from torch.optim import swa_utils

    devices = swa_utils._get_foreach_kernels_supported_devices

    def supported() -> list[str]:
        return [d for d in devices() if d != "tpu"]

    swa_utils._get_foreach_kernels_supported_devices = supported


def _before_optimizer_step(*args: Any) -> None:
    from tpu_core import _C

    if _C.memory_is_checked():
        from tpu_core import memory_limit

        memory_limit.before_optimizer_step(*args)
    if _C.is_initialized() and _C.is_capturing(_C.current_device()):
        from tpu_core import graph_capture

        graph_capture.before_optimizer_step(*args)


def _after_optimizer_step(*_: Any) -> None:
    from tpu_core import modes

    modes.after_optimizer_step()
