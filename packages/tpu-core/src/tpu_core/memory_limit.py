"""Checks of memory before it is taken, so that what finds too little leaves the state as it was.

What a program needs is known before it runs. Once it has been started, the memory of its donated
inputs is gone; so the limit is compared first, be it ``TPU_MEMORY_LIMIT``, the device's own, or a
share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tpu_core import _C
from tpu_core import config as configuration
from tpu_core.config import config
from tpu_core.errors import OutOfMemoryError
from tpu_core.errors.base import format_bytes
from tpu_core.pjrt.host_memory import host_memory

_LARGEST = 3  # tensors that an error names

# Devices whose runtime says how much memory they have.
_devices: dict[int, Any] = {}
# Shares of the memory that the process may use, by device (`set_fraction`).
_fractions: dict[int, float] = {}
_is_limited = False  # by a configuration in force


def watch(client: Any) -> None:
    """Check memory from now on, where a limit is set or a device has one of its own.

    Args:
        client: A `tpu_core.pjrt.client.Client`.
    """
    _devices.clear()
    for index, device in enumerate(client.devices):
        if (stats := device.memory_stats()) and stats.get("bytes_limit"):
            _devices[index] = device
    configuration.on_memory_limit(_note_limits)


def _note_limits(is_limited: bool) -> None:
    global _is_limited
    _is_limited = is_limited
    _choose()


def _choose() -> None:
    _C.set_memory_checked(_is_limited or bool(_devices) or bool(_fractions))


def set_fraction(device: int, fraction: float) -> None:
    """Let the process use a share of a device's memory.

    Args:
        device: Its index.
        fraction: From 0 to 1; 1 lifts the limit.
    """
    if fraction < 1:
        _fractions[device] = fraction
    else:
        _fractions.pop(device, None)
    _choose()


def fraction_of(device: int) -> float:
    """The share that `set_fraction` set, 1 by default."""
    return _fractions.get(device, 1.0)


def limit_of(device: int, live: int) -> tuple[int | None, int]:
    """(limit, bytes in use) of a device; the limit is None where there is none.

    Args:
        device: Its index.
        live: Bytes that the values of this process hold there.
    """
    limit = config().memory_limit
    if limit is None and device in _devices:
        stats = _devices[device].memory_stats()
        limit, live = stats["bytes_limit"], max(live, stats.get("bytes_in_use", live))
    if (fraction := _fractions.get(device)) is not None:
        limit = int(fraction * (host_memory() if limit is None else limit))
    return limit, live


def refuse_program(
    device: int, needed: int, live: int, program: Any, inside: list[tuple[str, int]]
) -> None:
    """Raise for a program that there is too little memory for.

    Args:
        device: Index of its device.
        needed: Bytes that it takes beside what is there.
        live: Bytes that are there.
        program: A `tpu_core.compiler.programs.Program`.
        inside: (line, bytes) of the largest results of its ops that it does not return.

    Raises:
        OutOfMemoryError: Live values, outputs and temporaries would exceed the limit.
    """
    limit, used = limit_of(device, live)
    what = f": a program of {program.ops} ops was to run"
    raise _error(device, what, needed, limit, used, program.line, inside)


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
        raise _error(device, "", needed, limit, used, _C.user_line(), [])
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
    device: int,
    doing: str,
    needed: int,
    limit: int | None,
    used: int,
    line: str | None,
    inside: list[tuple[str, int]],
) -> OutOfMemoryError:
    from tpu_core import live_memory

    _C.note_out_of_memory(device, needed, max((limit or 0) - used, 0))
    allocated = [tensor for tensor in live_memory.live_tensors(device) if not tensor.is_pending]
    kinds = live_memory.bytes_by_kind(allocated)
    if (rest := used - sum(kinds.values())) > 0:
        kinds[live_memory.RUNNING] = rest
    values: dict[str, object] = {}
    if kinds:
        values["live by kind"] = _listed(kinds.items())
        values["largest"] = "; ".join(
            f"{format_bytes(tensor.nbytes)} {tensor}" for tensor in allocated[:_LARGEST]
        )
    if inside:
        values["largest inside the program"] = "; ".join(
            f"{format_bytes(nbytes)} at {place}" for place, nbytes in inside
        )
    return OutOfMemoryError(
        f"Device tpu:{device} is out of memory{doing}.",
        needed=needed,
        limit=limit,
        live=used,
        values=values,
        line=line or None,
        remedy=" ".join(_remedies(kinds, sum(nbytes for _, nbytes in inside))),
    )


def _listed(kinds: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in kinds)


def _remedies(kinds: dict[str, int], inside: int) -> Iterator[str]:
    """Advice that frees memory, with how much, the most first; then what needs less."""
    from tpu_core import live_memory as live

    frees = {
        live.GRADIENTS: "optimizer.zero_grad() frees {} of gradients.",
        live.ACTIVATIONS: "backward(), or dropping the loss and other results of the forward, "
        "frees {} of activations; torch.no_grad() keeps none.",
        live.TENSORS: "Deleting tensors that are no longer needed frees up to {}: "
        "torch.tpu.memory_summary() lists them.",
    }
    for kind, nbytes in sorted(kinds.items(), key=lambda item: -item[1]):
        if kind in frees:
            yield frees[kind].format(format_bytes(nbytes))
    yield "A smaller batch, torch.utils.checkpoint and bfloat16 need less."
    if kinds.get(live.PARAMETERS, 0) + kinds.get(live.OPTIMIZER, 0) > max(
        sum(kinds.values()) / 2, inside
    ):
        yield "So does sharding parameters and optimizer state over more devices (FSDP)."


def before_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Global hook of ``torch.optim``: what a step changes on the host is given back with the rest.

    The step counters of Adam and its kind are on the host, and the dictionaries of its state. Where
    what is recorded finds too little memory, the step has happened there and not on the device.
    """
    device = _C.current_device()
    if _C.is_initialized() and limit_of(device, 0)[0] is not None:
        _C.add_undo(device, _undo_of(optimizer))


def _undo_of(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    # Tensors of the device are what they were by then; who changes them on the host does so in
    # place. Nearly all of those are single numbers.
    before = {
        key: {name: (value, _host_copy(value)) for name, value in state.items()}
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
                if isinstance(copy, torch.Tensor):
                    value.copy_(copy)
                elif copy is not None:
                    value.fill_(copy)
                restored[name] = value

    return undo


def _host_copy(value: Any) -> Any:
    """The contents of a tensor on the host: a number, or a copy; None of anything else."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return None
    return value.item() if value.ndim == 0 else value.clone()
