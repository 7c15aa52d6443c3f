"""XLA's profiler: traces of what programs run, and what their HLO says of each instruction."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from jax._src.lib import _profiler

# XLA's own events of single instructions; the passes of a compile are of level 3.
_HOST_LEVEL = 2


class TraceSession:
    """A trace of XLA's runtime, from its making until `stop`."""

    def __init__(self) -> None:
        options = _profiler.ProfileOptions()
        options.python_tracer_level = 0  # PyTorch's profiler has the Python stack
        options.host_tracer_level = _HOST_LEVEL
        self._session: Any = _profiler.ProfilerSession(options)

    def stop(self) -> bytes:
        """The trace, a serialized ``XSpace``.

        Raises:
            RuntimeError: Another trace was being taken when it began, such as
                `jax.profiler.trace`.
        """
        session, self._session = self._session, None
        return bytes(session.stop())


# Program, device and run.
RunKey = tuple[int, int, int]


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

    @property
    def run_key(self) -> RunKey:
        """Key of its run, unlike all others."""
        return self.program, self.device, self.run


@dataclass(frozen=True, slots=True)
class Execution:
    """A call that sent a program to a device, and its run; nanoseconds since the epoch."""

    start: int
    end: int
    run: RunKey


@dataclass(frozen=True, slots=True)
class XlaTrace:
    """Programs in XLA's trace.

    Attributes:
        started: Time at which the trace began, nanoseconds since the epoch.
        ops: The runs of instructions, by start.
        executions: The calls that are known to have led to them, by start; none where the platform
            does not trace them.
    """

    started: int
    ops: list[OpEvent]
    executions: list[Execution]


def read(xspace: bytes) -> XlaTrace:
    """Read a serialized trace."""
    data = jax.profiler.ProfileData.from_serialized_xspace(xspace)
    started = _start_time(data)
    ops: list[OpEvent] = []
    calls = _Calls()
    for plane in data.planes:
        if (device := re.fullmatch(r"/device:(?!CUSTOM)\w+:(\d+)", plane.name)) is not None:
            ops += _device_ops(plane, int(device[1]), started)
        elif plane.name == "/host:CPU":
            for i, line in enumerate(plane.lines):
                for event in line.events:
                    stats = dict(event.stats)
                    start = started + int(event.start_ns)
                    end = start + int(event.duration_ns)
                    if "hlo_op" not in stats or "run_id" not in stats:
                        calls.add(i, event.name, start, end, stats)
                        continue
                    op = OpEvent(
                        str(stats["hlo_op"]),
                        int(stats.get("program_id", 0)),
                        int(stats["run_id"]),
                        int(stats.get("device_ordinal", 0)),
                        f"{plane.name} {i}",
                        start,
                        end,
                    )
                    ops.append(op)
                    calls.ran(i, op)
    ops.sort(key=lambda e: (e.start, -e.end))
    return XlaTrace(started, ops, calls.executions())


def _device_ops(plane: Any, device: int, started: int) -> list[OpEvent]:
    """The runs of instructions on a TPU, which has a line of programs and one of instructions."""
    modules: list[tuple[int, int, int, int]] = []  # start, end, program, run
    for line in plane.lines:
        if line.name != "XLA Modules":
            continue
        for event in line.events:
            stats = dict(event.stats)
            number = re.search(r"\((\d+)\)$", event.name)  # jit_run(17)
            start = started + int(event.start_ns)
            end = start + int(event.duration_ns)
            run = int(stats.get("run_id", start))
            modules.append((start, end, int(number[1]) if number else 0, run))
    modules.sort()
    found = []
    for line in plane.lines:
        if line.name not in ("XLA Ops", "Async XLA Ops"):
            continue
        for event in line.events:
            start = started + int(event.start_ns)
            at = bisect.bisect_right(modules, (start, 1 << 63)) - 1
            if at < 0 or start > modules[at][1]:
                continue
            # The name is the instruction's text: %fusion.3 = f32[8]{0} fusion(...)
            name = event.name.split(" = ", 1)[0].lstrip("%")
            end = start + int(event.duration_ns)
            found.append(OpEvent(name, *modules[at][2:], device, line.name, start, end))
    return found


class _Calls:
    """Finds the runs that calls led to.

    XLA:CPU notes the task that a call gives to another thread.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[int, int, int]] = []  # start, end, line
        self._given: list[tuple[int, int, int]] = []  # time, line, task
        self._begun: list[tuple[int, int, int]] = []  # time, line, task
        self._first: dict[int, list[OpEvent]] = {}  # by line

    def add(self, line: int, name: str, start: int, end: int, stats: dict[str, Any]) -> None:
        if name.endswith("::ExecuteHelperOnSingleDevice"):
            self._calls.append((start, end, line))
        elif name == "ThreadpoolListener::Record":
            self._given.append((start, line, int(stats.get("_p", 0))))
        elif name == "ThreadpoolListener::StartRegion":
            self._begun.append((start, line, int(stats.get("_c", 0))))

    def ran(self, line: int, op: OpEvent) -> None:
        self._first.setdefault(line, []).append(op)

    def executions(self) -> list[Execution]:
        begun = {task: (time, line) for time, line, task in self._begun}
        starts = {
            line: sorted((op.start, op.run_key) for op in ops) for line, ops in self._first.items()
        }
        ends = {line: sorted(t for t, n, _ in self._begun if n == line) for line in starts}
        found = []
        for start, end, line in sorted(self._calls):
            tasks = [task for time, n, task in self._given if n == line and start <= time <= end]
            spans = [(line, start, end)]  # small programs run in the call
            for task in tasks:
                if task in begun:
                    time, worker = begun[task]
                    later = ends.get(worker, [])
                    at = bisect.bisect_right(later, time)
                    spans.append((worker, time, later[at] if at < len(later) else 1 << 63))
            for worker, first, last in spans:
                own = starts.get(worker, [])
                at = bisect.bisect_left(own, (first,))
                if at < len(own) and own[at][0] <= last:
                    found.append(Execution(start, end, own[at][1]))
                    break
        return found


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
            Where XLA made it without any, that of what reads it, else of what it reads.
        fused: Those of the instructions that were fused into it.
    """

    source: str
    fused: tuple[str, ...] = field(default=())


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%?([\w.\-]+) = ")
_SOURCE = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_OPERAND = re.compile(r"%([\w.\-]+)")


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
    fused: dict[str, tuple[str, ...]] = {}
    sources: dict[str, str] = {}
    operands: dict[str, list[str]] = {}
    for name, text in lines:
        source = _SOURCE.search(text)
        calls = _CALLS.search(text)
        fused[name] = tuple(dict.fromkeys(inside.get(calls[1], ()))) if calls else ()
        sources[name] = source[1] if source else next(iter(fused[name][-1:]), "")
        operands[name] = _OPERAND.findall(text.split("(", 1)[-1].split("metadata=", 1)[0])
    _fill_in(sources, operands)
    return {name: Instruction(sources[name], fused[name]) for name in sources}


def _fill_in(sources: dict[str, str], operands: dict[str, list[str]]) -> None:
    """Sources for instructions of XLA's own, such as copies, from their neighbours."""
    names = list(sources)  # operands come first
    for name in reversed(names):
        if not _is_argument(sources[name]):
            for operand in operands[name]:
                if not sources.get(operand, name):
                    sources[operand] = sources[name]
    for name in names:
        if not sources[name]:
            known = (sources.get(operand, "") for operand in operands[name])
            sources[name] = next((s for s in known if s and not _is_argument(s)), "")


def _is_argument(source: str) -> bool:
    return not source or source.startswith("arguments[")


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
