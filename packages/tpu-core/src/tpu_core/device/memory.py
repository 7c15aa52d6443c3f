"""Memory statistics, from the storages that live on the device and the programs that ran."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from tpu_core.device.devices import _index


def _device(device: Any) -> torch.device:
    return torch.device("tpu", _index(device))


def memory_stats(device: Any = None) -> OrderedDict[str, Any]:
    """Statistics by name, as `torch.accelerator.memory_stats` gives them.

    ``allocated_bytes.all.current`` is what live tensors hold, results still to be computed
    included; ``.peak`` also counts the temporaries of the programs that ran.
    """
    return torch.accelerator.memory_stats(_device(device))


def memory_allocated(device: Any = None) -> int:
    """Bytes that live tensors hold."""
    return torch.accelerator.memory_allocated(_device(device))


def max_memory_allocated(device: Any = None) -> int:
    """Most bytes held at once, temporaries of programs included, since the last reset."""
    return torch.accelerator.max_memory_allocated(_device(device))


def memory_reserved(device: Any = None) -> int:
    """Bytes taken from the device; PJRT keeps no cache of its own, so those that are allocated."""
    return torch.accelerator.memory_reserved(_device(device))


def max_memory_reserved(device: Any = None) -> int:
    """Most bytes taken at once since the last reset."""
    return torch.accelerator.max_memory_reserved(_device(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start a new peak at what is allocated now."""
    torch.accelerator.reset_peak_memory_stats(_device(device))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Set the counts of allocations and frees to zero."""
    torch.accelerator.reset_accumulated_memory_stats(_device(device))


def empty_cache() -> None:
    """Drop what is no longer referenced."""
    torch.accelerator.empty_cache()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) bytes of a device."""
    return torch.accelerator.get_memory_info(_device(device))


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """A table of the statistics.

    Args:
        device: The current one unless given.
        abbreviated: Leave out the counts.
    """
    from tpu_core.errors_base import format_bytes

    stats = memory_stats(device)
    free, total = mem_get_info(device)
    rows = [("total", format_bytes(total)), ("free", format_bytes(free))]
    for kind in ("current", "peak"):
        rows.append((f"allocated, {kind}", format_bytes(stats[f"allocated_bytes.all.{kind}"])))
    if not abbreviated:
        rows.append(("tensors' values", str(stats["allocation.all.current"])))
        rows.append(("out of memory", str(stats["num_ooms"])))
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        [f"{_device(device)}", *(f"  {name:<{width}}  {value}" for name, value in rows)]
    )
