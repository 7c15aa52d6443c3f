"""Devices: counting, choosing, describing, waiting."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from tpu_core import _C


def _index(device: Any = None) -> int:
    """Index of a device given as None, int, ``"tpu:1"`` or `torch.device`.

    Raises:
        ValueError: It is a device of another type.
    """
    if device is None:
        return _C.current_device()
    if isinstance(device, int):
        return device if device >= 0 else _C.current_device()
    device = torch.device(device)
    if device.type != "tpu":
        raise ValueError(f"Expected a tpu device, but got: {device}")
    return _C.current_device() if device.index is None else device.index


def is_available() -> bool:
    """Return whether there is a device; starts nothing and never raises."""
    try:
        return device_count() > 0
    except Exception:
        return False


def device_count() -> int:
    """Number of devices; starts nothing."""
    from tpu_core import runtime

    return runtime.device_count()


def is_initialized() -> bool:
    """Return whether the device was started in this process."""
    return _C.is_initialized() and not _C.in_bad_fork()


def init() -> None:
    """Start the device; it also starts by itself on first use."""
    torch.empty(0, device="tpu")


def _is_in_bad_fork() -> bool:
    return bool(_C.in_bad_fork())


def current_device() -> int:
    """Index of the current device."""
    return int(_C.current_device())


def get_device() -> torch.device:
    """The current device, ``torch.device("tpu", index)``."""
    return torch.device("tpu", current_device())


def set_device(device: Any) -> None:
    """Make a device the current one of this thread."""
    index = _index(device)
    if index >= 0:
        _C.set_current_device(index)


def _exchange_device(index: int) -> int:
    before = current_device()
    if index >= 0:
        _C.set_current_device(index)
    return before


_maybe_exchange_device = _exchange_device


class _DeviceGuard:
    """Makes a device current for a block; index -1 changes nothing."""

    def __init__(self, index: int) -> None:
        self.idx = index
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: Any) -> None:
        _exchange_device(self.prev_idx)


class device(_DeviceGuard):
    """Context manager that makes a device the current one.

    Args:
        device: Index, ``"tpu:1"``, `torch.device` or None (no change).
    """

    def __init__(self, device: Any) -> None:
        super().__init__(-1 if device is None else _index(device))


class device_of(_DeviceGuard):
    """Context manager that makes the device of a tensor or storage the current one, if it is a
    tpu.
    """

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device.index if obj.device.type == "tpu" else -1)


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of a device.

    Attributes:
        name: Kind of the chip (``"TPU v5e"``), or ``"cpu"`` on the CPU platform.
        platform: PJRT platform.
        total_memory: Bytes of memory.
        multi_processor_count: Cores of the device (1: XLA shows each core as a device).
        coords: Position in the slice's torus, or None.
    """

    name: str
    platform: str
    total_memory: int
    multi_processor_count: int = 1
    coords: tuple[int, ...] | None = None


@functools.cache
def _properties(index: int) -> DeviceProperties:
    from tpu_core.pjrt.chips import name_of
    from tpu_core.runtime import memory_info, runtime

    chip = runtime().client.devices[index]
    coords = getattr(chip, "coords", None)
    return DeviceProperties(
        name=name_of(chip.device_kind),
        platform=chip.platform,
        total_memory=memory_info(index)[1],
        coords=tuple(coords) if coords is not None else None,
    )


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Properties of a device; starts it."""
    index = _index(device)
    if device_count() == 0:
        init()  # raises, and says why there is none
    if not 0 <= index < device_count():
        raise AssertionError(f"Invalid device id {index}; there are {device_count()} devices.")
    return _properties(index)


def get_device_name(device: Any = None) -> str:
    """Name of the device's chip, such as ``"TPU v5e"``; ``"cpu"`` on the CPU platform."""
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> dict[str, Any]:
    """Dtypes the device computes with, as `torch.accelerator.get_device_capability` gives them."""
    return torch.accelerator.get_device_capability(torch.device("tpu", _index(device)))


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: bfloat16 is the TPU's own format."""
    return True


def synchronize(device: Any = None) -> None:
    """Wait until the device has done everything recorded so far; its errors are raised here."""
    if is_initialized() or _is_in_bad_fork():
        torch.accelerator.synchronize(torch.device("tpu", _index(device)))
