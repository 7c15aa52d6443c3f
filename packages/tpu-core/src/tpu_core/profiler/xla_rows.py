"""Rows of programs and of the XLA ops inside them, from XLA's trace."""

from __future__ import annotations

import bisect
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_core.pjrt import profiling
from tpu_core.pjrt.profiling import Instruction, OpEvent, RunKey, XlaTrace
from tpu_core.profiler.events import Launch, RecordedOp
from tpu_core.profiler.graph_lines import line_of_node
from tpu_core.profiler.rows import Kind, Row, Tracks, op_name, short_line, short_name

_LONGEST_LAUNCH = 1_000_000_000  # nanoseconds
# As `tpu_core.compiler.segment` writes it: line, op and node;
# `tpu_compile.evaluate` likewise.
_LABEL = re.compile(r"(?:([^/]+:\d+)/)?([\w.:]+)#(\w+)")


class Programs:
    """Instructions of programs, read from their HLO when they are asked for.

    Args:
        backend: The PJRT client.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._instructions: dict[int, dict[str, Instruction]] = {}  # by id of the executable
        self._by_number: dict[int, list[Any]] | None = None

    def instructions(self, run: Run) -> dict[str, Instruction]:
        """The instructions of a run's program by name; none where it is not known."""
        executable = _executable(run.launch) if run.launch else None
        if executable is not None:
            return self.of(executable)
        if self._by_number is None:
            self._by_number = defaultdict(list)
            for e in profiling.live_executables(self._backend):
                if (number := profiling.program_id(e)) is not None:
                    self._by_number[number].append(e)
        names = {event.op for event in run.events}
        for e in self._by_number.get(run.program, ()):
            # A program from the cache has the id that it had where it was compiled.
            if names <= (found := self.of(e)).keys():
                return found
        return {}

    def of(self, executable: Any) -> dict[str, Instruction]:
        """Those of an executable."""
        if id(executable) not in self._instructions:
            self._instructions[id(executable)] = profiling.instructions(executable)
        return self._instructions[id(executable)]


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a program: its events, by start, and the launch, where that is known."""

    program: int
    device: int
    events: list[OpEvent]
    launch: Launch | None


def runs(trace: XlaTrace, launches: Sequence[Launch], programs: Programs) -> list[Run]:
    """The runs in a trace, each with its launch."""
    by_run: dict[RunKey, list[OpEvent]] = defaultdict(list)
    for event in trace.ops:
        by_run[event.run_key].append(event)
    known = _by_time(trace, launches)
    _by_number(known, by_run, launches)
    _by_order(known, by_run, launches, programs)
    return [Run(key[0], key[1], events, known.get(key)) for key, events in by_run.items()]


def _by_time(trace: XlaTrace, launches: Sequence[Launch]) -> dict[RunKey, Launch]:
    """The launch in whose time a run's call lies."""
    found: dict[RunKey, Launch] = {}
    starts = [launch.start for launch in launches]
    for call in trace.executions:
        middle = (call.start + call.end) // 2  # the clocks differ by microseconds
        for launch in reversed(launches[: bisect.bisect_right(starts, middle)]):
            if middle <= launch.end:
                found.setdefault(call.run, launch)
                break
            if launch.end < middle - _LONGEST_LAUNCH:
                break
    return found


def _by_number(
    known: dict[RunKey, Launch], by_run: Mapping[RunKey, list[OpEvent]], launches: Sequence[Launch]
) -> None:
    """Add runs whose program is known from another run: a program counts its runs."""
    own: dict[int, list[Launch]] = defaultdict(list)
    for launch in launches:
        own[id(_executable(launch))].append(launch)
    ordinals = {id(launch): i for same in own.values() for i, launch in enumerate(same)}
    for (program, device, run), launch in list(known.items()):
        first = run - ordinals[id(launch)]
        for i, other in enumerate(own.get(id(_executable(launch)), ())):
            if (key := (program, device, first + i)) in by_run:
                known.setdefault(key, other)


def _by_order(
    known: dict[RunKey, Launch],
    by_run: Mapping[RunKey, list[OpEvent]],
    launches: Sequence[Launch],
    programs: Programs,
) -> None:
    """Add runs that come in the order of the launches of a program with their instructions."""
    found = {id(launch) for launch in known.values()}
    waiting: dict[int, list[Launch]] = defaultdict(list)
    for launch in launches:
        if id(launch) not in found and _executable(launch) is not None:
            waiting[id(_executable(launch))].append(launch)
    lost: dict[tuple[int, int, frozenset[str]], list[RunKey]] = defaultdict(list)
    for key in sorted(by_run, key=lambda key: by_run[key][0].start):
        if key not in known:
            lost[key[0], key[1], frozenset(e.op for e in by_run[key])].append(key)
    for (_, _, names), keys in lost.items():
        for same in waiting.values():
            if same and names <= programs.of(_executable(same[0])).keys():
                # A run that began before the profile has no launch in it.
                known.update(zip(reversed(keys), reversed(same)))
                same.clear()
                break


def _executable(launch: Launch) -> Any:
    return getattr(launch.program, "executable", None)


def rows(
    found: Sequence[Run], programs: Programs, tracks: Tracks, flows: Iterator[int]
) -> Iterator[Row]:
    """The rows of some runs."""
    lanes: dict[str, str] = {}
    for run in found:
        yield from _program_rows(run, tracks, flows)
        instructions = programs.instructions(run)
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
    others = dict.fromkeys(op_name(op, line) for op, line, _ in fused if op)
    if len(others) > 1:
        row.metadata["fused"] = ", ".join(others)
    return row


def _described(source: str, launch: Launch | None) -> tuple[str, str, RecordedOp | None]:
    """Op, line and node that an instruction was lowered from.

    The first label is of a recorded op; one after it, of an op of the graph that was recorded.
    """
    labels = _LABEL.findall(source)
    if not labels:
        return "", "", None
    line, op, name = labels[-1]
    number = labels[0][2]
    node = None
    if launch is not None and number.isdecimal() and int(number) < len(launch.ops):
        node = launch.ops[int(number)]
        # A program from the cache was compiled where the lines may have been others.
        if len(labels) > 1:
            line = line_of_node(node.plan, name) or line
        else:
            op = node.plan.op if node.plan is not None else op
            line = node.line or line
    return short_name(op), line, node
