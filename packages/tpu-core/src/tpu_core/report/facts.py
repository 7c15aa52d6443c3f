"""Contents of a report, taken from the metrics: programs, causes of recompiles, totals."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpu_core import memory_history
from tpu_core.errors.base import format_bytes
from tpu_core.metrics import CompileEvent, Fallback, GraphSplit, KernelChoice, Runs

if TYPE_CHECKING:
    from tpu_core.metrics import Metrics


@dataclass(frozen=True)
class ProgramFacts:
    """A program: how it was made, and how often it ran since."""

    event: CompileEvent
    runs: Runs


@dataclass(frozen=True)
class Cause:
    """Programs that were compiled at one line for one reason, the changing numbers aside.

    Attributes:
        count, seconds: Number of programs and the time that making them took.
        line: The user's line.
        reason: The reason of the latest.
    """

    count: int
    seconds: float
    line: str | None
    reason: str


@dataclass(frozen=True)
class Share:
    """A part of a whole, as a bar shows it.

    Attributes:
        name: Of the part.
        value: Seconds, or a number of ops.
        note: Explanation.
    """

    name: str
    value: float
    note: str


@dataclass(frozen=True)
class Facts:
    """Everything that a report shows.

    Attributes:
        totals: Name and count, in words.
        host_time: Seconds of the host that are known, by cause, the most first.
        tiers: Number of ops by the tier that ran them; empty where there is one tier alone.
        programs: In the order in which they were made.
        causes: Of programs that are not the first of their ops, the costliest first.
        fallbacks: Ops that ran on the CPU, the slowest first.
        splits: Ops that graphs of `torch.compile` are compiled without, and in how many graphs.
        kernels: Implementations of ops that were chosen for programs, and how often, as they came.
        host_parts: Parts of segments that CPU kernels ran, by line, the slowest first.
        syncs: (reason, line, count) of waits for the device, the most frequent first.
        peaks: The most memory of each device, by line, where memory history is recorded.
        runs_counted: Whether the runs of each program are known.
        time: Time of the collection, as of `time.time`.
    """

    totals: list[tuple[str, str]]
    host_time: list[Share]
    tiers: list[Share]
    programs: list[ProgramFacts]
    causes: list[Cause]
    fallbacks: list[tuple[str, Fallback]]
    splits: list[tuple[GraphSplit, int]]
    kernels: list[tuple[KernelChoice, int]]
    host_parts: list[tuple[str | None, Runs]]
    syncs: list[tuple[str, str | None, int]]
    peaks: list[memory_history.Peak]
    runs_counted: bool
    time: float


def collect(metrics: Metrics) -> Facts:
    """The facts of ``metrics`` at this moment."""
    events, runs = metrics.compile_events(), metrics.runs()
    syncs = sorted(metrics.host_syncs().items(), key=lambda item: -item[1])
    counts = metrics.snapshot()
    return Facts(
        _totals(counts),
        _host_time(counts, events, runs),
        _tiers(counts),
        [ProgramFacts(e, (runs or {}).get(e.key, Runs())) for e in events],
        _causes(events),
        sorted(metrics.fallbacks().items(), key=lambda item: -item[1].seconds),
        list(metrics.graph_splits().items()),
        list(metrics.kernels().items()),
        sorted(metrics.host_parts().items(), key=lambda item: -item[1].seconds),
        [(reason, line, count) for (reason, line), count in syncs],
        memory_history.peaks(),
        runs is not None,
        time.time(),
    )


def _host_time(
    count: dict[str, float], events: Sequence[CompileEvent], runs: Mapping[str, Runs] | None
) -> list[Share]:
    waited = sum(e.seconds for e in events if e.source == "compiled")
    found = [
        Share("compiling", waited, "the line waits for XLA"),
        Share("loading programs", count["disk_load_seconds"], "from the cache folder"),
        Share(
            "fallbacks", count["fallback_seconds"], "ops on the CPU, copies and waiting included"
        ),
    ]
    if runs is not None:
        started = sum(r.seconds for r in runs.values())
        found.append(Share("starting programs", started, "small ones on the CPU run meanwhile"))
    return sorted((s for s in found if s.value > 0), key=lambda s: -s.value)


def _tiers(count: dict[str, float]) -> list[Share]:
    if not count["host_ops"]:
        return []
    moved = f"{count['promotions']:.0f} segments went over, {count['demotions']:.0f} came back"
    return [
        Share("CPU kernels", count["host_ops"], "run at once"),
        Share("programs", count["ops"], moved),
    ]


def _totals(count: dict[str, float]) -> list[tuple[str, str]]:
    totals = [
        ("compiles", f"{count['compiles']:.0f} in {count['compile_seconds']:.2f} s"),
        ("loaded from disk", timed(count["cache_hits_disk"], count["disk_load_seconds"])),
        ("found in memory", f"{count['cache_hits_memory']:.0f}"),
        ("programs run", f"{count['executions']:.0f}"),
        ("segments", f"{count['segments']:.0f}"),
        ("ops recorded", f"{count['ops']:.0f}"),
        ("ops run by CPU kernels", f"{count['host_ops']:.0f}"),
        ("segments moved to a program", f"{count['promotions']:.0f}"),
        ("of them moved back", f"{count['demotions']:.0f}"),
        ("fallbacks to the CPU", timed(count["fallbacks"], count["fallback_seconds"])),
        ("host syncs", f"{count['host_syncs']:.0f}"),
        ("host to device", f"{count['h2d_count']:.0f}, {format_bytes(count['h2d_bytes'])}"),
        ("device to host", f"{count['d2h_count']:.0f}, {format_bytes(count['d2h_bytes'])}"),
    ]
    if count["graph_splits"]:
        totals.append(("ops outside of compiled graphs", f"{count['graph_splits']:.0f}"))
    if count["host_parts"]:
        parts = timed(count["host_parts"], count["host_part_seconds"])
        totals.append(("parts run by CPU kernels", parts))
    if count["padding_copies"]:
        totals.append(("inputs padded by way of the host", f"{count['padding_copies']:.0f}"))
    if count["verifications"]:
        totals.append(("runs verified op by op", f"{count['verifications']:.0f}"))
    if count["debug_checks"]:
        totals.append(("debug checks", f"{count['debug_checks']:.0f}"))
    return totals


def _causes(events: Sequence[CompileEvent]) -> list[Cause]:
    groups: dict[tuple[str | None, str], list[CompileEvent]] = {}
    for event in events:
        if FIRST_USE not in event.reason:
            kind = re.sub(r"\d+", "N", event.reason)
            groups.setdefault((event.line, kind), []).append(event)
    causes = [
        Cause(len(group), sum(e.seconds for e in group), line, group[-1].reason)
        for (line, _), group in groups.items()
    ]
    return sorted(causes, key=lambda cause: -cause.seconds)


FIRST_USE = ": first use"  # in the reason of a program whose op was new altogether


def timed(count: float, seconds: float) -> str:
    """``"3 in 0.12 s"``."""
    return f"{count:.0f} in {seconds:.2f} s"
