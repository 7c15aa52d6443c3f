"""The recorded history of device memory: snapshots in PyTorch's format, and the peak by line.

The extension records each allocation and each free with the stack of the thread
(``csrc/values/memory_history.cpp``). PJRT has no caching allocator that a process could look into,
so each allocation is a segment of its own, whose address is made up and used once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from tpu_core import _C, runtime
from tpu_core.memory_stacks import Stack, stack

_LARGE = 1 << 20  # of a segment that memory_viz calls "large"


class Event(enum.IntEnum):
    """Events as the extension numbers them."""

    ALLOCATION = _C.ENUMS["MemoryEvent"]["ALLOCATION"]
    FREE = _C.ENUMS["MemoryEvent"]["FREE"]
    DONATION = _C.ENUMS["MemoryEvent"]["DONATION"]
    TEMPORARIES = _C.ENUMS["MemoryEvent"]["TEMPORARIES"]
    TEMPORARIES_END = _C.ENUMS["MemoryEvent"]["TEMPORARIES_END"]
    OUT_OF_MEMORY = _C.ENUMS["MemoryEvent"]["OUT_OF_MEMORY"]
    SNAPSHOT = _C.ENUMS["MemoryEvent"]["SNAPSHOT"]


_TAKES = (Event.ALLOCATION, Event.TEMPORARIES)
_GIVES = (Event.FREE, Event.DONATION, Event.TEMPORARIES_END)


_skipped: tuple[str, ...] = ()


def start(
    *,
    events: bool,
    stacks: bool,
    stacks_of_frees: bool,
    max_entries: int,
    clear: bool,
    skip_actions: tuple[str, ...] = (),
) -> None:
    """Record memory from now on.

    Args:
        events: Keep allocations and frees, not only what is allocated now.
        stacks, stacks_of_frees: Keep the stacks of allocations, of frees.
        max_entries: Number of latest events that are kept.
        clear: Drop the events so far.
        skip_actions: Actions of memory_viz that snapshots leave out.
    """
    global _skipped
    _skipped = skip_actions
    runtime.initialize()
    _C.start_memory_history(events, stacks, stacks_of_frees, max_entries, clear)


def stop() -> None:
    """Record nothing from now on, and drop what was recorded."""
    _C.stop_memory_history()


def snapshot() -> dict[str, Any]:
    """Allocated memory and the events that are kept, in the format of PyTorch's memory_viz."""
    events, live = _C.memory_history()
    segments = [_segment(device, address, nbytes, stack(s)) for device, s, address, nbytes in live]
    traces: list[list[dict[str, Any]]] = [[] for _ in range(runtime.device_count())]
    for event, device, s, address, nbytes, free, microseconds in events:
        for entry in _entries(Event(event), address, nbytes, free, stack(s)):
            if entry["action"] not in _skipped:
                entry |= {"stream": 0, "pool_id": (0, 0), "time_us": microseconds}
                traces[device].append(entry)
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {"backend": "pjrt", "expandable_segments": False},
        "external_annotations": [],
    }


def _segment(device: int, address: int, nbytes: int, made: Stack) -> dict[str, Any]:
    block = {
        "address": address,
        "size": nbytes,
        "requested_size": nbytes,
        "state": "active_allocated",
        "frames": made.frames,
    }
    return {
        "device": device,
        "address": address,
        "total_size": nbytes,
        "allocated_size": nbytes,
        "active_size": nbytes,
        "requested_size": nbytes,
        "stream": 0,
        "segment_type": "large" if nbytes > _LARGE else "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": made.frames,
        "blocks": [block],
    }


def _entries(
    event: Event, address: int, nbytes: int, free: int, made: Stack
) -> list[dict[str, Any]]:
    """The actions that stand for an event."""

    def entries(*actions: str, **extra: Any) -> list[dict[str, Any]]:
        return [
            {"action": a, "addr": address, "size": nbytes, "frames": made.frames, **extra}
            for a in actions
        ]

    if event in _TAKES:
        extra = {"user_metadata": made.name} if made.name else {}
        return entries("segment_alloc", **extra) + entries("alloc", **extra)
    if event in _GIVES:
        extra = {"user_metadata": "donated to a program"} if event is Event.DONATION else {}
        return entries("free_requested", "free_completed", "segment_free", **extra)
    if event is Event.OUT_OF_MEMORY:
        return entries("oom", device_free=free)
    return entries("snapshot")


@dataclass(frozen=True, slots=True)
class PeakRow:
    """Memory of one line at the peak.

    Attributes:
        line: The user's line; None for memory that was there before the recording.
        use: ``"values"``, or which temporaries of a program.
        nbytes, count: Bytes, and the number of allocations.
    """

    line: str | None
    use: str
    nbytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that was allocated at once during the events that are kept.

    Attributes:
        device: Index of the device.
        nbytes: Bytes at the peak.
        rows: By line, the largest first.
    """

    device: int
    nbytes: int
    rows: list[PeakRow]


def peaks() -> list[Peak]:
    """The peak of each device that has events; empty where no events are recorded."""
    events, live = _C.memory_history()
    return [_peak(device, events, live) for device in sorted({e[1] for e in events})]


def _peak(device: int, events: list[Any], live: list[Any]) -> Peak:
    changes = [e for e in events if e[1] == device and (e[0] in _TAKES or e[0] in _GIVES)]
    made = {address for event, _, _, address, *_ in changes if event in _TAKES}
    # What was there when the events that are kept begin.
    held: dict[int, tuple[int, int]] = {
        address: (s, nbytes)
        for d, s, address, nbytes in live
        if d == device and address not in made
    }
    for event, _, _, address, nbytes, *_ in changes:
        if event in _GIVES and address not in made:
            held.setdefault(address, (0, nbytes))
    now = most = sum(nbytes for _, nbytes in held.values())
    end = 0
    for i, (event, _, _, _, nbytes, *_) in enumerate(changes):
        now += nbytes if event in _TAKES else -nbytes
        if now > most:
            most, end = now, i + 1
    for event, _, s, address, nbytes, *_ in changes[:end]:
        if event in _TAKES:
            held[address] = (s, nbytes)
        else:
            held.pop(address, None)
    rows: dict[tuple[str | None, str], list[int]] = {}
    for s, nbytes in held.values():
        place = stack(s)
        rows.setdefault((place.line, place.name or "values"), []).append(nbytes)
    found = [PeakRow(line, use, sum(sizes), len(sizes)) for (line, use), sizes in rows.items()]
    return Peak(device, most, sorted(found, key=lambda row: -row.nbytes))
