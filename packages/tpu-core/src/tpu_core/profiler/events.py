"""Raw events of the extension, noted while a profile was taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class HostOp:
    """An op that a CPU kernel ran on the device's memory.

    Attributes:
        name: Of the overload, ``aten::add.Tensor``.
        line: The user's, ``"train.py:31 in step"``.
        start, end: Nanoseconds since the epoch.
        device: Index.
        thread: The system's id.
        correlation: Id of the profiler's row that was open.
    """

    name: str
    line: str
    start: int
    end: int
    device: int
    thread: int
    correlation: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy of some bytes between host and device; the rest as of `HostOp`."""

    is_to_device: bool
    bytes: int
    start: int
    end: int
    device: int
    correlation: int


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """An op of a program: its plan, or None for uninitialised memory; line and row as `HostOp`."""

    plan: Any
    line: str
    correlation: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A program that was sent to the device.

    Attributes:
        program: Its `tpu_core.compiler.programs.Program`.
        cut: Reason of the end of its segment.
        start, end: Of the host's call, nanoseconds since the epoch.
        device, thread, correlation: As of `HostOp`.
        ops: In the order of the segment.
    """

    program: Any
    cut: str
    start: int
    end: int
    device: int
    thread: int
    correlation: int
    ops: list[RecordedOp]


@dataclass(frozen=True, slots=True)
class Events:
    """All of them."""

    host_ops: list[HostOp]
    launches: list[Launch]
    transfers: list[Transfer]

    @classmethod
    def read(cls, raw: dict[str, Any]) -> Events:
        """From the dict that the extension gives."""
        return cls(
            [HostOp(*e) for e in raw["host_ops"]],
            [
                Launch(
                    program, cut, start, end, device, thread, row, [RecordedOp(*op) for op in ops]
                )
                for program, cut, start, end, device, thread, row, ops in raw["launches"]
            ],
            [Transfer(*e) for e in raw["transfers"]],
        )
