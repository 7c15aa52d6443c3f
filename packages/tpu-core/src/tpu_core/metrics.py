"""Counters of what the runtime does: compiles with their reasons, cache, fallbacks, host syncs.

One process-wide `METRICS`; its methods are cheap enough to call for every segment and safe to call
from any thread. `Metrics.snapshot` is flat, so that two snapshots can be subtracted
(`Metrics.delta`); the lists behind it are in `Metrics.compile_events`, `Metrics.fallbacks` and
`Metrics.host_syncs`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

logger = logging.getLogger("tpu_core")

# What each key of a snapshot means. `fallback.<op>` and `host_sync.<reason>` come on top.
COUNTERS: dict[str, str] = {
    "compiles": "Programs compiled by XLA.",
    "compile_seconds": "Seconds spent in those compiles, background threads included.",
    "compiles_pending": "Programs that are being compiled in the background.",
    "cache_hits_memory": "Programs found in memory.",
    "substitutions": "Those of them made for other live values: with results that nothing reads, "
    "or without taking memory that they could have taken.",
    "cache_hits_disk": "Programs loaded from the cache folder.",
    "disk_load_seconds": "Seconds spent loading them.",
    "cache_misses": "Programs found in neither.",
    "executions": "Programs run.",
    "pieces": "Those of them that were a single op of a segment whose own program was not there.",
    "padded_executions": "Those of them that ran on padded arrays, for sizes that vary.",
    "padding_copies": "Inputs of those that were copied to the host and back, for other padding.",
    "host_parts": "Parts of segments that differ in each step, few ops before a read, new sizes: "
    "run by CPU kernels, as each would be a program to compile.",
    "host_part_seconds": "Seconds they took, copies and waiting included.",
    "outlines": "Forms of ops traced to see whether padded arrays serve a new size.",
    "host_ops": "Ops run at once by PyTorch's CPU kernels, on the CPU platform.",
    "promotions": "Segments that went over from CPU kernels to a program of their own.",
    "demotions": "Those of them that went back, as the program was slower.",
    "segments": "Segments of recorded ops that were cut.",
    "ops": "Ops recorded.",
    "signatures": "Forms of ops seen: overload, shapes, dtypes and static arguments.",
    "graph_splits": "Ops of graphs of `torch.compile` that are in none of their programs.",
    "fallbacks": "Ops run on the CPU for want of a lowering.",
    "fallback_seconds": "Seconds they took, copies and waiting included.",
    "host_syncs": "Times the host waited for the device.",
    "h2d_count": "Copies from the host to the device.",
    "h2d_bytes": "Bytes copied from the host to the device.",
    "d2h_count": "Copies from the device to the host.",
    "d2h_bytes": "Bytes copied from the device to the host.",
    "verifications": "Runs of programs that were repeated op by op and compared (TPU_VERIFY).",
    "debug_checks": "Results checked for NaN and infinity in debug mode.",
}

# A process that compiles without end must not fill memory with its history.
_MOST_EVENTS = 10_000
_MOST_OPS = 1_000_000  # listed in the events; 8 bytes each


# Where a program came from: compiled while its segment waited or in the background, or the cache.
Source = Literal["compiled", "background", "disk"]


@dataclass(frozen=True, slots=True)
class CompileEvent:
    """One program that was made ready to run.

    Attributes:
        seconds: Wall time of the compile or the load.
        reason: The op and argument that was new, and the earlier value:
            ``"aten.mm.default: self float32[8, 128] -> float32[8, 131]"``.
        source: ``"compiled"`` by XLA, compiled in the ``"background"`` while the segment ran op by
            op, or loaded from ``"disk"``.
        ops: Number of ops in the program.
        line: The user's line that led to it, ``"train.py:31"``.
        key: Key of the program in the cache.
        cut: Reason of the end of the recorded segment: ``"optimizer step"``, ``"item"``, ...
        contents: The user's line and the name of each op, in order.
        time: Time at which it was ready, as of `time.time`.
    """

    seconds: float
    reason: str
    source: Source = "compiled"
    ops: int = 0
    line: str | None = None
    key: str = ""
    cut: str = ""
    contents: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    time: float = field(default_factory=time.time, compare=False)

    def __str__(self) -> str:
        verb = _VERBS[self.source]
        where = f" at {self.line}" if self.line else ""
        return f"{verb} {self.ops} ops in {self.seconds:.3f} s{where}: {self.reason}"


_VERBS: dict[Source, str] = {
    "compiled": "compiled",
    "background": "compiled in the background",
    "disk": "loaded from disk",
}


@dataclass(frozen=True, slots=True)
class Runs:
    """Run counts of a program.

    Attributes:
        count: Number of runs.
        seconds: Time the host spent in starting them. Programs run asynchronously, so that this is
            not the device's time, except for small programs on the CPU, which run at once.
    """

    count: int = 0
    seconds: float = 0.0


RunSource = Callable[[], Mapping[str, tuple[int, float]]]


@dataclass(slots=True)
class Fallback:
    """Number and duration of an op's runs on the CPU, and the line that called it first."""

    count: int = 0
    seconds: float = 0.0
    line: str | None = None


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """An implementation that was chosen for an op where a program was lowered.

    Attributes:
        op: As in `tpu_kernels.using`.
        implementation: Its name.
        why: Rules that do not hold, of those that would be tried before it; empty where none would.
        line: The user's line.
    """

    op: str
    implementation: str
    why: str
    line: str | None


@dataclass(frozen=True, slots=True)
class GraphSplit:
    """An op of a compiled graph that runs outside of the graph's programs.

    Attributes:
        op: The overload.
        why: The reason.
        line: The user's line.
    """

    op: str
    why: str
    line: str | None


class Metrics:
    """Thread-safe counters; see `COUNTERS` for what is counted.

    Example:
        >>> before = METRICS.snapshot()
        >>> train_step()
        >>> METRICS.delta(before)["host_syncs"]
        0
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Callable[[], Mapping[str, int]] = dict
        self._base: Mapping[str, int] = {}
        self._runs: RunSource | None = None
        self._base_runs: Mapping[str, tuple[int, float]] = {}
        self._clear()

    def _clear(self) -> None:
        self._count: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._events: deque[CompileEvent] = deque()
        self._listed = 0  # ops in the events
        self._fallbacks: dict[str, Fallback] = {}
        self._syncs: dict[tuple[str, str | None], int] = {}
        self._kernels: dict[KernelChoice, int] = {}
        self._parts: dict[str | None, Runs] = {}
        self._splits: dict[GraphSplit, int] = {}

    def compiled(self, event: CompileEvent) -> None:
        """Count a program that was made ready, and log one line: a compile as INFO, a load as
        DEBUG.
        """
        compiled = event.source != "disk"
        with self._lock:
            self._events.append(event)
            self._listed += len(event.contents)
            while len(self._events) > _MOST_EVENTS or (
                self._listed > _MOST_OPS and len(self._events) > 1
            ):
                self._listed -= len(self._events.popleft().contents)
            if compiled:
                self._count["compiles"] += 1
                self._count["compile_seconds"] += event.seconds
            else:
                self._count["cache_hits_disk"] += 1
                self._count["disk_load_seconds"] += event.seconds
        logger.log(logging.INFO if compiled else logging.DEBUG, "%s", event)

    def compiling(self, change: int) -> None:
        """Count programs that are begun (1) or done with (-1) in the background."""
        with self._lock:
            self._count["compiles_pending"] += change

    def padded_execution(self, copies: int) -> None:
        """Count a run of a program on padded arrays, and the inputs that were padded for it."""
        with self._lock:
            self._count["padded_executions"] += 1
            self._count["padding_copies"] += copies

    def verification(self) -> None:
        """Count a run of a program that was repeated op by op."""
        with self._lock:
            self._count["verifications"] += 1

    def host_part(self, line: str | None, seconds: float) -> None:
        """Count a part of a segment that CPU kernels ran, and that begins at a line."""
        with self._lock:
            before = self._parts.get(line, Runs())
            self._parts[line] = Runs(before.count + 1, before.seconds + seconds)
            self._count["host_parts"] += 1
            self._count["host_part_seconds"] += seconds

    def outline(self) -> None:
        """Count a form of an op that was traced for the sizes in it."""
        with self._lock:
            self._count["outlines"] += 1

    def cache_miss(self) -> None:
        """Count a program found neither in memory nor on disk."""
        with self._lock:
            self._count["cache_misses"] += 1

    def fallback(self, op: str, line: str | None, seconds: float) -> bool:
        """Count an op run on the CPU; true at the first call of an op, when a warning is due."""
        with self._lock:
            entry = self._fallbacks.get(op)
            first = entry is None
            if entry is None:
                entry = self._fallbacks[op] = Fallback(line=line)
            entry.count += 1
            entry.seconds += seconds
            self._count["fallbacks"] += 1
            self._count["fallback_seconds"] += seconds
        return first

    def host_sync(self, line: str | None, reason: str) -> None:
        """Count a wait of the host for the device, such as ``reason="item"``."""
        with self._lock:
            self._syncs[reason, line] = self._syncs.get((reason, line), 0) + 1
            self._count["host_syncs"] += 1

    def kernel(self, choice: KernelChoice) -> None:
        """Count a choice among the implementations of an op."""
        with self._lock:
            self._kernels[choice] = self._kernels.get(choice, 0) + 1

    def graph_split(self, split: GraphSplit) -> bool:
        """Count an op that a graph is compiled without; true at the first of an op."""
        with self._lock:
            first = all(known.op != split.op for known in self._splits)
            self._splits[split] = self._splits.get(split, 0) + 1
            self._count["graph_splits"] += 1
        return first

    def d2h(self, nbytes: int) -> None:
        """Count a copy of ``nbytes`` bytes from the device to the host."""
        with self._lock:
            self._count["d2h_count"] += 1
            self._count["d2h_bytes"] += nbytes

    def debug_check(self) -> None:
        """Count a check of a result for NaN and infinity."""
        with self._lock:
            self._count["debug_checks"] += 1

    def set_source(self, totals: Callable[[], Mapping[str, int]]) -> None:
        """Set the source of the fast path's counts; here they are only read.

        Args:
            totals: Gives running totals by key of `COUNTERS`.
        """
        base = totals()
        with self._lock:
            self._totals, self._base = totals, base

    def program_count(self) -> int:
        """Number of programs compiled or loaded; cheaper than a snapshot."""
        return int(self._count["compiles"] + self._count["cache_hits_disk"])

    def set_runs(self, runs: RunSource) -> None:
        """Set the source of single programs' counts.

        Args:
            runs: Gives the number of runs and their seconds (see `Runs`) by key of the program.
        """
        base = dict(runs())
        with self._lock:
            self._runs, self._base_runs = runs, base

    def compile_events(self) -> list[CompileEvent]:
        """The programs compiled or loaded, oldest first: the latest 10,000, fewer of large ones."""
        with self._lock:
            return list(self._events)

    def runs(self) -> dict[str, Runs] | None:
        """Runs of each program by its key; None where that is not counted."""
        source = self._runs
        if source is None:
            return None
        totals = source()
        with self._lock:
            base = self._base_runs
        found = {}
        for key, (count, seconds) in totals.items():
            earlier, earlier_seconds = base.get(key, (0, 0.0))
            # Programs that were dropped and made again count from zero.
            if count < earlier:
                earlier, earlier_seconds = 0, 0.0
            found[key] = Runs(count - earlier, seconds - earlier_seconds)
        return found

    def fallbacks(self) -> dict[str, Fallback]:
        """Count, seconds and first line of each op that ran on the CPU."""
        with self._lock:
            return {
                op: Fallback(entry.count, entry.seconds, entry.line)
                for op, entry in self._fallbacks.items()
            }

    def host_parts(self) -> dict[str | None, Runs]:
        """Number and seconds of the parts that CPU kernels ran, by the line they begin at."""
        with self._lock:
            return dict(self._parts)

    def host_syncs(self) -> dict[tuple[str, str | None], int]:
        """Number of host syncs by (reason, line)."""
        with self._lock:
            return dict(self._syncs)

    def kernels(self) -> dict[KernelChoice, int]:
        """Number of times each implementation was chosen where programs were lowered in this
        process.
        """
        with self._lock:
            return dict(self._kernels)

    def graph_splits(self) -> dict[GraphSplit, int]:
        """Ops outside of the programs of compiled graphs, and in how many graphs."""
        with self._lock:
            return dict(self._splits)

    def snapshot(self) -> dict[str, float]:
        """Every counter of `COUNTERS`, with ``fallback.<op>`` and ``host_sync.<reason>`` counts."""
        totals = self._totals()
        with self._lock:
            counts = dict(self._count)
            for key, total in totals.items():
                counts[key] += total - self._base.get(key, 0)
            for op, entry in self._fallbacks.items():
                counts[f"fallback.{op}"] = entry.count
            for (reason, _), count in self._syncs.items():
                key = f"host_sync.{reason}"
                counts[key] = counts.get(key, 0) + count
        return counts

    def delta(self, previous: Mapping[str, float]) -> dict[str, float]:
        """Counts since ``previous``, an earlier `snapshot`."""
        return {key: value - previous.get(key, 0) for key, value in self.snapshot().items()}

    def reset(self) -> None:
        """Set every counter to zero and forget the events."""
        base = self._totals()
        base_runs = dict(self._runs()) if self._runs else {}
        with self._lock:
            self._base, self._base_runs = base, base_runs
            pending = self._count["compiles_pending"]
            self._clear()
            self._count["compiles_pending"] = pending


METRICS = Metrics()
