"""Rows of programs and of the XLA ops inside them, from XLA's trace."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_core.pjrt import profiling
from tpu_core.pjrt.profiling import Instruction, OpEvent
from tpu_core.profiler.events import Launch, RecordedOp
from tpu_core.profiler.rows import Kind, Row, Tracks, op_name, short_line, short_name

# As `tpu_core.compiler.segment` writes it: line, op and node.
_LABEL = re.compile(r"(?:([^/]+:\d+)/)?([\w.:]+)#(\d+)")


class Programs:
    """Programs by the ids of XLA's traces; what their HLO says is read when it is asked for."""

    def __init__(self, backend: Any, launches: Sequence[Launch]) -> None:
        self._backend = backend
        self._executables: dict[int, Any] = {}
        self._instructions: dict[int, dict[str, Instruction]] = {}
        self._ids: dict[int, int | None] = {}
        for launch in launches:
            self.id_of(launch)

    def id_of(self, launch: Launch) -> int | None:
        """The id of a launch's program; None where it has none of its own."""
        executable = getattr(launch.program, "executable", None)
        if executable is None:
            return None
        if id(executable) not in self._ids:
            number = profiling.program_id(executable)
            self._ids[id(executable)] = number
            if number is not None:
                self._executables[number] = executable
        return self._ids[id(executable)]

    def instructions(self, program: int) -> dict[str, Instruction]:
        """The instructions of a program by name; none where it is gone."""
        if program not in self._instructions:
            if program not in self._executables:
                for executable in profiling.live_executables(self._backend):
                    if (number := profiling.program_id(executable)) is not None:
                        self._executables.setdefault(number, executable)
            executable = self._executables.get(program)
            self._instructions[program] = (
                profiling.instructions(executable) if executable is not None else {}
            )
        return self._instructions[program]


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a program: its events, by start, and the launch, where that is known."""

    program: int
    device: int
    events: list[OpEvent]
    launch: Launch | None


def runs(events: Sequence[OpEvent], launches: Sequence[Launch], programs: Programs) -> list[Run]:
    """The runs in a trace, each with its launch: both come in one order for a program."""
    by_run: dict[tuple[int, int, int], list[OpEvent]] = defaultdict(list)
    for event in events:
        by_run[event.program, event.device, event.run].append(event)
    by_program: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for key in sorted(by_run, key=lambda key: key[2]):
        by_program[key[0]].append(key)
    sent: dict[int, list[Launch]] = defaultdict(list)
    for launch in launches:
        if (number := programs.id_of(launch)) is not None:
            sent[number].append(launch)
    found = []
    for program, keys in by_program.items():
        # A run that began before the profile has no launch in it.
        own = sent.get(program, [])
        before = max(len(keys) - len(own), 0)
        for key, launch in itertools.zip_longest(keys, [None] * before + own):
            if key is not None:
                found.append(Run(program, key[1], by_run[key], launch))
    return sorted(found, key=lambda run: run.events[0].start)


def rows(
    found: Sequence[Run], programs: Programs, tracks: Tracks, flows: Iterator[int]
) -> Iterator[Row]:
    """The rows of some runs."""
    lanes: dict[str, str] = {}
    for run in found:
        yield from _program_rows(run, tracks, flows)
        instructions = programs.instructions(run.program)
        linked: set[int] = set()
        for event, is_parent in _nested(run.events):
            lane = lanes.setdefault(event.lane, f"XLA ops {len(lanes) + 1}")
            track = tracks.number(run.device, lane)
            row = _op_row(event, instructions, run.launch, track)
            if is_parent:  # its time is that of the ops inside it
                row.kind, row.correlation = Kind.PROGRAM, 0
            elif row.correlation and row.correlation not in linked:
                linked.add(row.correlation)
                row.flow = next(flows)
                yield marker(row)
            yield row


def marker(row: Row) -> Row:
    """The row from which the arrow to a device's row starts; the extension puts it into the row
    that they are correlated with.
    """
    return Row(
        Kind.HOST, "tpu::record", 0, 0, 0, 0, row.correlation, flow=row.flow, starts_flow=True
    )


def program_name(launch: Launch | None) -> str:
    """Name of a program's row."""
    if launch is None:
        return "XLA program"
    lines = [op.line for op in launch.ops if op.line]
    where = f" ({short_line(lines[-1])})" if lines else ""
    count = len(launch.ops)
    return f"program of {count} op{'s' if count != 1 else ''}{where}"


def _program_rows(run: Run, tracks: Tracks, flows: Iterator[int]) -> Iterator[Row]:
    launch = run.launch
    name = program_name(launch)
    row = Row(
        Kind.PROGRAM,
        name,
        min(e.start for e in run.events),
        max(e.end for e in run.events),
        run.device,
        tracks.number(run.device, "Programs"),
        metadata={"program_id": run.program, "run_id": run.events[0].run},
    )
    if launch is not None:
        row.metadata |= {"key": launch.program.key, "cut": launch.cut, "ops": len(launch.ops)}
        row.flow = next(flows)
        yield launch_row(launch, row.flow)
    yield row


def launch_row(launch: Launch, flow: int = 0) -> Row:
    """The host's row of a launch."""
    import os

    return Row(
        Kind.HOST,
        "tpu::launch",
        launch.start,
        launch.end,
        os.getpid(),
        launch.thread,
        flow=flow,
        starts_flow=True,
        metadata={"program": program_name(launch), "key": launch.program.key},
    )


def _nested(events: Sequence[OpEvent]) -> Iterator[tuple[OpEvent, bool]]:
    """Each event, and whether others of its lane lie inside it."""
    by_lane: dict[str, list[OpEvent]] = defaultdict(list)
    for event in events:
        by_lane[event.lane].append(event)
    for lane in by_lane.values():
        for event, following in itertools.zip_longest(lane, lane[1:]):
            inside = following is not None and following.start < event.end
            yield event, inside and following.end <= event.end


def _op_row(
    event: OpEvent, instructions: dict[str, Instruction], launch: Launch | None, track: int
) -> Row:
    row = Row(
        Kind.OP, event.op, event.start, event.end, event.device, track, metadata={"hlo": event.op}
    )
    instruction = instructions.get(event.op)
    if instruction is None:
        return row
    op, line, node = _described(instruction.source, launch)
    row.metadata["source"] = instruction.source
    if op:
        row.name = op_name(op, line)
        row.metadata |= {"op": op, "line": line}
    if node is not None:
        row.correlation = node.correlation
    fused = [_described(source, launch) for source in instruction.fused]
    others = dict.fromkeys(op_name(o, l) for o, l, _ in fused if o)
    if len(others) > 1:
        row.metadata["fused"] = ", ".join(others)
    return row


def _described(source: str, launch: Launch | None) -> tuple[str, str, RecordedOp | None]:
    """Op, line and node that an instruction was lowered from."""
    label = _LABEL.search(source)
    if label is None:
        return "", "", None
    op, line, node = short_name(label[2]), label[1] or "", None
    number = int(label[3])
    if launch is not None and number < len(launch.ops):
        node = launch.ops[number]
        # A program from the cache was compiled where the lines may have been others.
        op = short_name(node.plan.op) if node.plan is not None else op
        line = node.line or line
    return op, line, node
