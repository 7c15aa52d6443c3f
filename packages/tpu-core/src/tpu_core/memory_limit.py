"""Checks of memory before it is taken, so that what finds too little leaves the state as it was.

What a program needs is known before it runs. Once it has been started, the memory of its donated
inputs is gone; so the limit is compared first, be it ``TPU_MEMORY_LIMIT`` or the device's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tpu_core import _C
from tpu_core import config as configuration
from tpu_core.config import config
from tpu_core.errors import OutOfMemoryError

# Devices whose runtime says how much memory they have.
_devices: dict[int, Any] = {}


def watch(client: Any) -> None:
    """Check memory from now on, where a limit is set or a device has one of its own.

    Args:
        client: A `tpu_core.pjrt.client.Client`.
    """
    _devices.clear()
    for index, device in enumerate(client.devices):
        if (stats := device.memory_stats()) and stats.get("bytes_limit"):
            _devices[index] = device
    if _devices:
        _C.set_memory_checked()
    configuration.on_memory_limit(_C.set_memory_checked)


def limit_of(device: int, live: int) -> tuple[int | None, int]:
    """(limit, bytes in use) of a device; the limit is None where there is none.

    Args:
        device: Its index.
        live: Bytes that the values of this process hold there.
    """
    limit = config().memory_limit
    if limit is not None or device not in _devices:
        return limit, live
    stats = _devices[device].memory_stats()
    return stats["bytes_limit"], max(live, stats.get("bytes_in_use", live))


def check_program(device: int, program: Any, needed: int, live: int) -> None:
    """Have a program run only where there is memory for it.

    Args:
        device: Index of its device.
        program: A `tpu_core.compiler.programs.Program`.
        needed: Bytes that it takes beside what is there.
        live: Bytes that are there.

    Raises:
        OutOfMemoryError: Live values, outputs and temporaries would exceed the limit.
    """
    limit, used = _fitting(device, needed, live)
    if limit is not None and used + needed > limit:
        raise _error(
            device, f", running a program of {program.ops} ops", needed, limit, used, program.line
        )


def check_allocation(device: int, needed: int, live: int, raises: bool) -> bool:
    """Return whether there is memory for ``needed`` bytes more.

    Args:
        device: Index of the device.
        needed: Number of bytes.
        live: Bytes that are there.
        raises: Raise where there is too little.

    Raises:
        OutOfMemoryError: There is too little.
    """
    limit, used = _fitting(device, needed, live)
    if limit is None or used + needed <= limit:
        return True
    if raises:
        raise _error(device, "", needed, limit, used, _C.user_line())
    return False


def _fitting(device: int, needed: int, live: int) -> tuple[int | None, int]:
    limit, used = limit_of(device, live)
    if limit is None or used + needed <= limit or used == live:
        return limit, used
    # What the runtime holds may be of programs that have yet to end.
    from tpu_core.interruptible import wait_for

    newest = _C.newest_array(device)
    if newest is not None and not newest.is_deleted():
        wait_for(newest)
    return limit_of(device, live)


def _error(
    device: int, doing: str, needed: int, limit: int, used: int, line: str | None
) -> OutOfMemoryError:
    _C.note_out_of_memory(device)
    return OutOfMemoryError(
        f"Out of memory on tpu:{device}{doing}.",
        needed=needed,
        limit=limit,
        live=used,
        line=line or None,
    )


def before_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Global hook of ``torch.optim``: what a step changes on the host is given back with the rest.

    The step counters of Adam and its kind are on the host. Where what is recorded may find too
    little memory, the step has happened there and not on the device.
    """
    device = _C.current_device()
    if not _C.is_initialized():
        return
    limit, _used = limit_of(device, 0)
    if limit is not None and _C.most_memory(device) > limit:
        _C.add_undo(device, _undo_of(optimizer))


def _undo_of(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    # Tensors of the device are what they were by then; who changes them on the host does so in
    # place.
    before = {
        key: {
            name: (value, value.clone())
            if isinstance(value, torch.Tensor) and value.device.type == "cpu"
            else (value, None)
            for name, value in state.items()
        }
        if isinstance(state, dict)
        else None
        for key, state in optimizer.state.items()
    }

    def undo() -> None:
        for key in [key for key in optimizer.state if key not in before]:
            del optimizer.state[key]
        for key, state in before.items():
            if state is None:
                continue
            restored = optimizer.state[key]
            restored.clear()
            for name, (value, copy) in state.items():
                if copy is not None:
                    value.copy_(copy)
                restored[name] = value

    return undo
