"""Memory statistics, from the storages that live on the device and the programs that ran."""

from __future__ import annotations

import os
import pickle
import sys
from collections import OrderedDict
from typing import Any, Literal

import torch

from tpu_core.device.devices import _index

_MOST_TENSORS = 10
_ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "oom",
    "snapshot",
)


def _device(device: Any) -> torch.device:
    return torch.device("tpu", _index(device))


def memory_stats(device: Any = None) -> OrderedDict[str, Any]:
    """Statistics by name, as `torch.accelerator.memory_stats` gives them.

    ``allocated_bytes.all.current`` is what live tensors hold, results still to be computed
    included; ``.peak`` also counts the temporaries of the programs that ran.
    """
    return torch.accelerator.memory_stats(_device(device))


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """The statistics as a tree: ``stats["allocated_bytes"]["all"]["peak"]``."""
    tree: dict[str, Any] = {}
    for name, value in memory_stats(device).items():
        *path, leaf = name.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[leaf] = value
    return tree


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


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Limit this process to a share of a device's memory.

    An allocation or program that exceeds it raises `torch.OutOfMemoryError`. On the CPU platform
    the share is one of the machine's memory or of ``TPU_MEMORY_LIMIT``, and ops run as programs as
    long as there is a limit: a program's needs are known before it runs.

    Args:
        fraction: From 0 to 1; 1 lifts the limit.
        device: The current one unless given.

    Raises:
        TypeError: The fraction is not a float.
        ValueError: It is not between 0 and 1.

    Example:
        >>> torch.tpu.set_per_process_memory_fraction(0.5)
    """
    from tpu_core import memory_limit, runtime

    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    runtime.initialize()
    memory_limit.set_fraction(_index(device), fraction)


def get_per_process_memory_fraction(device: Any = None) -> float:
    """The share that `set_per_process_memory_fraction` set, 1.0 by default."""
    from tpu_core import memory_limit

    return memory_limit.fraction_of(_index(device))


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Live memory: bytes by kind, the largest tensors with their names, the peak by line.

    A tensor is named after the module, gradient or optimizer that it belongs to. Lines are known
    of what was made while memory history was recorded.

    Args:
        device: The current one unless given.
        abbreviated: The totals alone.

    Example:
        >>> torch.tpu.memory._record_memory_history()
        >>> train()
        >>> print(torch.tpu.memory_summary())
    """
    from tpu_core import live_memory, memory_history
    from tpu_core.errors.base import format_bytes
    from tpu_core.report import Table, peak_table, short

    place = _device(device)
    stats = memory_stats(place)
    free, total = mem_get_info(place)
    rows = [("total", format_bytes(total)), ("free", format_bytes(free))]
    for kind in ("current", "peak"):
        rows.append((f"allocated, {kind}", format_bytes(stats[f"allocated_bytes.all.{kind}"])))
    if not abbreviated:
        rows.append(("tensors' values", str(stats["allocation.all.current"])))
        rows.append(("out of memory", str(stats["num_ooms"])))
    tables = [Table(f"{place}", ("memory", ""), rows)]
    if not abbreviated:
        tensors = live_memory.live_tensors(place.index)
        kinds = live_memory.bytes_by_kind(tensors)
        tables.append(
            Table("Live", ("kind", "bytes"), [(k, format_bytes(n)) for k, n in kinds.items()])
        )
        tables.append(
            Table(
                "Largest tensors",
                ("bytes", "tensor", "name", "line"),
                [
                    (
                        format_bytes(t.nbytes),
                        t.geometry,
                        t.name or t.kind,
                        short(t.line) or "not recorded",
                    )
                    for t in tensors[:_MOST_TENSORS]
                ],
            )
        )
        tables += [peak_table(p) for p in memory_history.peaks() if p.device == place.index]
    return "\n\n".join(str(table) for table in tables if table.rows)


def memory_snapshot(mempool_id: Any = None, include_traces: bool = True) -> list[dict[str, Any]]:
    """Segments that are allocated, as `torch.cuda.memory_snapshot` lists them.

    They are known from `_record_memory_history` on; before it there are none.

    Raises:
        ValueError: A memory pool is named; there are none.
    """
    if mempool_id is not None:
        raise ValueError("Device 'tpu' has no memory pools: PJRT allocates each array by itself.")
    return _snapshot()["segments"]


def _record_memory_history(
    enabled: Literal["state", "all"] | bool | None = "all",
    context: Literal["state", "alloc", "all"] | None = "all",
    stacks: Literal["python", "all"] = "all",
    max_entries: int = sys.maxsize,
    device: Any = None,
    clear_history: bool = False,
    compile_context: bool = False,
    global_record_annotations: bool = False,
    skip_actions: list[str] | None = None,
) -> None:
    """Record allocations and frees of every device with their stacks, as `torch.cuda.memory` does.

    Args:
        enabled: ``"all"``: keep the events; ``"state"``: what is allocated alone; None: stop, and
            drop what was recorded.
        context: Choice of the stacks to keep: of what is allocated (``"state"``), of allocations
            (``"alloc"``, the same here), of frees too (``"all"``), or none (None).
        stacks: Stacks are of Python frames in either case. In a backward pass they begin with the
            line of the forward op.
        max_entries: Number of latest events that are kept, of all devices together.
        device: Ignored, as on CUDA: every device is recorded.
        clear_history: Drop the events so far.
        compile_context, global_record_annotations: Not supported.
        skip_actions: Actions to leave out of snapshots.

    Raises:
        ValueError: An argument is none of the above.
        NotImplementedError: `compile_context` or `global_record_annotations` is set.

    Example:
        >>> torch.tpu.memory._record_memory_history(max_entries=100_000)
        >>> train()
        >>> torch.tpu.memory._dump_snapshot("memory.pickle")
    """
    from tpu_core import memory_history

    if isinstance(enabled, bool):
        enabled = "all" if enabled else None
    for name, value, valid in (
        ("enabled", enabled, (None, "state", "all")),
        ("context", context, (None, "state", "alloc", "all")),
        ("stacks", stacks, ("python", "all")),
    ):
        if value not in valid:
            raise ValueError(f"expected {name} to be one of {valid}, got {value!r}")
    unknown = sorted(set(skip_actions or ()) - set(_ACTIONS))
    if unknown:
        raise ValueError(f"expected skip_actions to be of {_ACTIONS}, got {unknown}")
    if max_entries < 0:
        raise ValueError(f"expected max_entries to be 0 or more, got {max_entries}")
    # torch.compile's contexts are in its own log, and ranges of record_function in profiles.
    if compile_context or global_record_annotations:
        raise NotImplementedError(
            "Device 'tpu' records neither compile contexts nor annotations with memory: leave "
            "compile_context and global_record_annotations unset."
        )
    if enabled is None:
        memory_history.stop()
        return
    memory_history.start(
        events=enabled == "all",
        stacks=context is not None,
        stacks_of_frees=context == "all",
        max_entries=max_entries,
        clear=clear_history,
        skip_actions=tuple(skip_actions or ()),
    )


def _snapshot(device: Any = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
    """Allocated memory and the events that were recorded, in the format of PyTorch's memory_viz.

    Ops that this thread has recorded run first. Each allocation is a segment of its own; addresses
    are made up, and used once. Temporaries of a program, whose bytes are XLA's analysis, are an
    allocation that ends with the program.

    Args:
        device: Ignored, as on CUDA: the snapshot has every device.
        augment_with_fx_traces: Not supported.
    """
    from tpu_core import _C, memory_history

    # A compiled graph is one program here: it has no FX code that runs and could be in a stack.
    if augment_with_fx_traces:
        raise NotImplementedError(
            "Device 'tpu' does not add FX traces to memory snapshots: leave "
            "augment_with_fx_traces unset; the temporaries of a compiled graph have their lines."
        )
    if _C.records_memory():
        _C.flush("memory snapshot")
        _C.record_snapshot(_index(device))
    return memory_history.snapshot()


def _dump_snapshot(
    filename: str | os.PathLike[str] = "dump_snapshot.pickle", augment_with_fx_traces: bool = False
) -> None:
    """Write `_snapshot` to a file that pytorch.org/memory_viz and `torch.cuda._memory_viz` read.

    Args:
        filename: The file; it is replaced if it exists.
        augment_with_fx_traces: Not supported.
    """
    snapshot = _snapshot(augment_with_fx_traces=augment_with_fx_traces)
    with open(filename, "wb") as file:
        pickle.dump(snapshot, file)
