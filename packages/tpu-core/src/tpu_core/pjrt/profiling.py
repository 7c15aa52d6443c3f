"""XLA's profiler: traces of what programs run, and what their HLO says of each instruction."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from jax._src.lib import _profiler

# XLA's own events of single instructions; the passes of a compile are of level 3.
_HOST_LEVEL = 2


class TraceSession:
    """A trace of XLA's runtime, from its making until `stop`.

    Raises:
        RuntimeError: Another trace is being taken, such as `jax.profiler.trace`.
    """

    def __init__(self) -> None:
        options = _profiler.ProfileOptions()
        options.python_tracer_level = 0  # PyTorch's profiler has the Python stack
        options.host_tracer_level = _HOST_LEVEL
        options.raise_error_on_start_failure = True
        self._session: Any = _profiler.ProfilerSession(options)

    def stop(self) -> bytes:
        """The trace, a serialized ``XSpace``."""
        session, self._session = self._session, None
        return bytes(session.stop())


@dataclass(frozen=True, slots=True)
class OpEvent:
    """A run of an HLO instruction.

    Attributes:
        op: Name of the instruction.
        program: Id of the HLO module.
        run: Id of the program's run.
        device: Ordinal of the device.
        lane: Thread or engine that ran it.
        start, end: Nanoseconds since the epoch.
    """

    op: str
    program: int
    run: int
    device: int
    lane: str
    start: int
    end: int


def op_events(xspace: bytes) -> list[OpEvent]:
    """The runs of instructions in a trace, by start."""
    found = []
    data = jax.profiler.ProfileData.from_serialized_xspace(xspace)
    offset = _start_time(data)
    for plane in data.planes:
        device = re.fullmatch(r"/device:\w+:(\d+).*", plane.name)
        if device is None and not plane.name.startswith("/host:CPU"):
            continue
        for i, line in enumerate(plane.lines):
            if device is not None and line.name in ("XLA Modules", "Steps", "Framework Ops"):
                continue
            lane = f"{plane.name} {i}"
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" not in stats or "run_id" not in stats:
                    continue
                start = offset + int(event.start_ns)
                found.append(
                    OpEvent(
                        str(stats["hlo_op"]),
                        int(stats.get("program_id", 0)),
                        int(stats["run_id"]),
                        int(device[1] if device else stats.get("device_ordinal", 0)),
                        lane,
                        start,
                        start + int(event.duration_ns),
                    )
                )
    return sorted(found, key=lambda e: (e.start, -e.end))


def _start_time(data: Any) -> int:
    """Time that the events' times count from."""
    for plane in data.planes:
        if plane.name == "Task Environment":
            return int(dict(plane.stats).get("profile_start_time", 0))
    return 0


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
        source: ``op_name`` of its metadata.
        fused: Those of the instructions that were fused into it.
    """

    source: str
    fused: tuple[str, ...] = field(default=())


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%?([\w.\-]+) = ")
_SOURCE = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLS = re.compile(r"calls=%?([\w.\-]+)")


def instructions(executable: Any) -> dict[str, Instruction]:
    """The instructions of a program by their name."""
    inside: dict[str, list[str]] = {}
    lines: list[tuple[str, str]] = []
    computation = ""
    for module in executable.hlo_modules():
        for text in module.to_string().splitlines():
            if (begin := _COMPUTATION.match(text)) is not None:
                computation = begin[1]
            elif (instruction := _INSTRUCTION.match(text)) is not None:
                lines.append((instruction[1], text))
                if (source := _SOURCE.search(text)) is not None:
                    inside.setdefault(computation, []).append(source[1])
    found = {}
    for name, text in lines:
        source = _SOURCE.search(text)
        calls = _CALLS.search(text)
        fused = tuple(dict.fromkeys(inside.get(calls[1], ()))) if calls else ()
        found[name] = Instruction(source[1] if source else "", fused)
    return found


_MODULE_ID = 5  # field `id` of HloModuleProto


def program_id(executable: Any) -> int | None:
    """The id by which traces name a program."""
    for module in executable.hlo_modules():
        for number, value in _varints(module.as_serialized_hlo_module_proto()):
            if number == _MODULE_ID:
                return value
    return None


def _varints(message: bytes) -> Iterator[tuple[int, int]]:
    """(number, value) of a serialized message's integer fields."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            yield tag >> 3, varint()
        elif kind == 2:
            length = varint()
            at += length
        else:
            at += 8 if kind == 1 else 4


def live_executables(backend: Any) -> list[Any]:
    """All programs that a client has loaded."""
    return list(backend.live_executables())
