"""Programs for segments: from memory's miss through the disk cache to XLA, each with its reason."""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from tpu_core import _C, gc_control
from tpu_core.cache.fingerprint import fingerprint
from tpu_core.cache.sources import package_digest
from tpu_core.cache.store import ExecutableStore
from tpu_core.cache.tiers import TieredStore
from tpu_core.compiler import dumps
from tpu_core.compiler import segment as segments
from tpu_core.compiler.background import Background
from tpu_core.compiler.host_parts import HostPart, is_small
from tpu_core.compiler.padded import PaddedPrograms
from tpu_core.compiler.reasons import Reason, Reasons, listing
from tpu_core.compiler.recompile_limit import Part, RecompileLimit
from tpu_core.compiler.segment import Segment
from tpu_core.compiler.spanning import spanning
from tpu_core.compiler.worker import CompileJob, Result
from tpu_core.compiler.workers import InProcess, WorkerProcess, Workers
from tpu_core.config import config
from tpu_core.errors import RecompilationError, RecompileLimitWarning, TpuError
from tpu_core.interruptible import InterruptibleCalls
from tpu_core.logs import warn_at
from tpu_core.lowering import implementations
from tpu_core.metrics import METRICS, CompileEvent, Source
from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt.host_memory import give_back_free_memory
from tpu_core.xla_status import map_xla_error

logger = logging.getLogger("tpu_core")

# Ops of a program that is a training step, say, whose temporaries fill a good part of the memory.
_LARGE = 64
_MOST_REFUSED = 4_096  # parts that CPU kernels do not run


@dataclass(frozen=True, slots=True)
class Program:
    """A program as the extension runs it and reports explain it.

    Attributes:
        execute: Runs it: of a loaded executable, or a function of a list of arrays.
        handlers: Result handlers of the executable; None where ``execute`` gives the results, or
            None where another program is to take its place.
        temporary_bytes: Memory that it needs beside arguments and outputs.
        aliased_bytes: Of the outputs, what takes the memory of an argument.
        compiled_in: For each number whether it is a constant of the program; None: as the extension
            proposed.
        executable: The PJRT executable, where there is one.
        on_host: CPU kernels run it. It serves once: what comes again is asked for again.

    Example:
        >>> Program(execute, None, 0, 0, segment.key, len(segment.nodes), "train.py:12")
    """

    execute: Any
    handlers: tuple[Any, ...] | None
    temporary_bytes: int
    aliased_bytes: int
    key: str
    ops: int
    line: str
    compiled_in: list[bool] | None = None
    executable: Any = None
    on_host: bool = False


_forbidden = 0  # blocks that forbid compiling, in any thread
_forbidden_lock = threading.Lock()


@contextmanager
def compiling_forbidden() -> Iterator[None]:
    """Make `ProgramBuilder.build` raise `RecompilationError` instead of compiling."""
    global _forbidden
    with _forbidden_lock:
        _forbidden += 1
    try:
        yield
    finally:
        with _forbidden_lock:
            _forbidden -= 1


def require_compiling_allowed(reason: str, ops: int, line: str | None) -> None:
    """Raise `RecompilationError` inside ``torch.tpu.no_recompile()``.

    Args:
        reason: The difference from earlier programs.
        ops: Number of ops in the program.
        line: The user's line.
    """
    if _forbidden:
        raise RecompilationError(
            "A program would have to be compiled inside torch.tpu.no_recompile().",
            values={"reason": reason, "ops": ops},
            line=line,
        )


class ProgramBuilder:
    """Builds programs for one client.

    Args:
        client: The PJRT client.
        store: The cache beyond this process, or None.
    """

    def __init__(self, client: pjrt.Client, store: ExecutableStore | TieredStore | None) -> None:
        self._client = client
        self._store = store
        self._reasons = Reasons()
        self._padded = PaddedPrograms(self, client, store)
        self.limit = RecompileLimit()
        self._refused_on_host: set[str] = set()
        self._compiles = InterruptibleCalls("tpu compile")
        # A TPU and a GPU are opened by one process.
        on_cpu = client.platform.name == "cpu"
        start = WorkerProcess if on_cpu else functools.partial(InProcess, client)
        workers = Workers(config().compile_workers, start)
        self.background = Background(workers, self.is_stored, self._finish_in_background)

    def build(
        self,
        exported: dict[str, Any],
        arrays: list[Any] | None = None,
        pads: bool = False,
        missing: list[tuple[str, int]] | None = None,
        divides: bool = False,
    ) -> Program | list[Part] | None:
        """A program for an exported segment: loaded from the cache or compiled.

        Args:
            exported: The segment, from the extension.
            arrays: Its inputs, where it is about to run.
            pads: Whether it may run on padded arrays.
            missing: Ops that no program in memory runs by itself, as (key of that program, node);
                None where the segment may not run op by op while its program is made.
            divides: True if the segment may run in parts.

        Returns:
            The program; None where the segment is to run op by op; a list where it is to run in
            parts.

        Raises:
            CompilationError: A lowering or XLA failed; the error names op and line.
            RecompilationError: It would have to be compiled, and that is forbidden.
        """
        s = Segment.from_export(exported)
        if (together := spanning(s)) is not None:
            return together(s)
        if s.on_host and (program := self._host_program(s)) is not None:
            return self._watched(program, s)
        reached = False
        if pads and arrays is not None:
            reached = divides and not s.on_host and self.limit.is_reached(s, self._padded.form(s))
            served = self._served(s, arrays, reached)
            if isinstance(served, list):
                return served
            if served is not None:
                return self._watched(served, s)
        if missing is not None:
            s = self.background.lifted(s)
        key = self._key(s)
        loaded = self.background.take(s, key)
        if loaded is None:
            # Beyond the limit one program for many sizes is wanted, not one for each op and size.
            waits = missing is not None and not reached
            if waits and self._runs_in_pieces(s, key, exported, missing or []):
                if missing:  # ops that are programs to compile
                    self.limit.made(s)
                return None
            reason = self._padded.comment(s, self.explain(s)) if pads else self.explain(s)
            lower = functools.partial(segments.lower, s)
            loaded = self.obtain(s, key, lower, s.outputs(), reason)
        self.remember(s)
        gc_control.resume()
        program = self.program(s, loaded, key)
        if missing is not None:
            program = replace(program, compiled_in=[n.compiled_in for n in s.numbers])
        if pads:
            self._padded.remember(s, program)
        return self._watched(program, s)

    def _served(self, s: Segment, arrays: list[Any], reached: bool) -> Program | list[Part] | None:
        """A padded program for a segment, or its parts; None where it runs as it was recorded.

        Args:
            s: The segment.
            arrays: Its inputs.
            reached: Whether its line is at the recompile limit.
        """
        if not reached:
            return self._padded.serve(s, arrays)
        padded = self._padded.serve(s, arrays, compiles=False)
        if padded is not None:
            return padded
        if self._padded.recurs(s) or self.is_stored(self._key(s)):
            return None
        if self.limit.recurs(s, self._padded.form(s)):
            return self._padded.serve(s, arrays)
        if (parts := self.limit.parts(s)) is None:
            padded = self._padded.serve(s, arrays)
            if padded is not None:
                return padded
            if self._padded.problem(s):
                parts = self.limit.parts(s, by_sizes=True)
        self._warn_of_limit(s, parts)
        return parts

    def _warn_of_limit(self, s: Segment, parts: list[Part] | None) -> None:
        found = self.limit.to_warn_of(s, parts) if config().performance_warnings else None
        if found is None:
            return
        node, programs = found
        in_parts = "what differs runs by CPU kernels, products aside, and the rest as programs"
        then = in_parts if parts else "each such step is compiled"
        problem = self._padded.problem(s)
        warn_at(
            node.line or _last_line(s),
            RecompileLimitWarning(
                f"{programs} programs were compiled for this step, and its ops differ again.",
                values={
                    "first op that differs": node.name,
                    **({"not on padded arrays": problem} if problem else {}),
                    "from now on": then,
                    "step ends at": _last_line(s),
                },
                line=node.line or None,
            ),
        )

    def _host_program(self, s: Segment) -> Program | None:
        """CPU kernels as the program of a part; None where they are not to run it."""
        if s.key in self._refused_on_host or not is_small(s):
            return None

        def refuse() -> None:
            if len(self._refused_on_host) >= _MOST_REFUSED:
                self._refused_on_host.clear()
            self._refused_on_host.add(s.key)

        return Program(
            HostPart(s, self._client.devices[s.device], refuse),
            None,
            0,
            0,
            f"host {s.key}",
            len(s.nodes),
            _last_line(s) or "",
            [False] * len(s.numbers),
            on_host=True,
        )

    def _watched(self, program: Program, s: Segment) -> Program:
        from tpu_core.verification import watch

        return watch(program, s, self._client.devices[s.device], self._drop)

    def _drop(self, key: str) -> None:
        """Take a program out of the cache of this machine."""
        disk = self._store.disk if isinstance(self._store, TieredStore) else self._store
        if disk is not None:
            disk.path(key).unlink(missing_ok=True)

    @property
    def may_compile(self) -> bool:
        """True if a compile would not raise."""
        return not _forbidden

    def _runs_in_pieces(
        self, s: Segment, key: str, exported: dict[str, Any], missing: list[tuple[str, int]]
    ) -> bool:
        def job() -> CompileJob:
            if any(n.plan is not None and n.plan.compute.is_local for n in s.nodes):
                return CompileJob(None, segments.lower(s), s.device)
            numbers = [(n.pack, n.compiled_in, n.value) for n in s.numbers]
            return CompileJob({**exported, "numbers": numbers}, None, s.device)

        lacking = [(self.key(s, k, s.constants_of(node)), s.nodes[node]) for k, node in missing]
        return self.background.serves_in_pieces(s, key, lacking, bool(_forbidden), job)

    def due(self, segment_key: str) -> bool:
        """Return whether to ask again for the program of a segment that runs op by op."""
        return bool(_forbidden) or self.background.due(segment_key)

    def is_stored(self, key: str) -> bool:
        """Return whether a program is in the cache of this machine."""
        disk = self._store.disk if isinstance(self._store, TieredStore) else self._store
        return disk is not None and disk.path(key).exists()

    def _finish_in_background(self, s: Segment, key: str, result: Result) -> pjrt.Loaded:
        """Load and store what a worker compiled, and count it."""
        assert result.payload is not None
        device = self._client.devices[s.device]
        executable = pjrt.deserialize(result.payload, device, self._client)
        if self._store is not None:
            self._store.put(key, result.payload, self._manifest(s))
        loaded = pjrt.load(executable, s.outputs(), device)
        reason = Reason("it came again; until now it ran op by op", s.nodes[-1].line or None)
        METRICS.cache_miss()
        METRICS.compiled(self._event(s, key, result.seconds, reason, "background"))
        self.limit.made(s)
        return loaded

    def explain(self, s: Segment) -> Reason:
        """Reason that a segment is new."""
        return self._reasons.explain(s)

    def remember(self, s: Segment) -> None:
        """Take note of a segment, for what is new in the next."""
        self._reasons.remember(s)

    def obtain(
        self,
        s: Segment,
        key: str,
        lower: Callable[[], bytes],
        outputs: Sequence[tuple[tuple[int, ...], np.dtype[Any]]],
        reason: Reason,
        check: Callable[[pjrt.Loaded], None] | None = None,
    ) -> pjrt.Loaded:
        """An executable from the disk cache, else compiled from what ``lower`` gives.

        Args:
            s: The segment to run.
            key: Its key in the cache.
            lower: Gives its StableHLO.
            outputs: Shape and dtype of each result.
            reason: Reason of the request.
            check: Called with a new one; what it raises keeps it out of the cache.
        """
        device = self._client.devices[s.device]
        started = time.perf_counter()
        large = len(s.nodes) >= _LARGE
        if large:
            give_back_free_memory()
        executable = self._from_disk(key, device)
        source: Source = "disk"
        if executable is None:
            require_compiling_allowed(reason.text, len(s.nodes), reason.line or _last_line(s))
            METRICS.cache_miss()
            source = "compiled"
            module = lower()
            dumps.lowered(key, module, listing(s))
            try:
                executable = self._compiles.run(
                    key, lambda: pjrt.compile_module(module, device, self._client)
                )
            except Exception as error:
                raise map_xla_error(
                    error, op=self._ops(s), line=_last_line(s), stage="compile"
                ) from error
            dumps.compiled(key, executable)
        loaded = pjrt.load(executable, outputs, device)
        if large:
            give_back_free_memory()
        seconds = time.perf_counter() - started
        METRICS.compiled(self._event(s, key, seconds, reason, source))
        self.limit.made(s)
        if source == "compiled":
            _C.note_compile(len({id(n.plan) for n in s.nodes}), len(s.nodes), seconds)
            if check is not None:
                check(loaded)
            self._to_disk(key, executable, s)
        return loaded

    @staticmethod
    def _event(
        s: Segment, key: str, seconds: float, reason: Reason, source: Source
    ) -> CompileEvent:
        line = reason.line or _last_line(s)
        return CompileEvent(
            seconds, reason.text, source, len(s.nodes), line, key, cut=s.cut, contents=listing(s)
        )

    def program(self, s: Segment, loaded: pjrt.Loaded, key: str) -> Program:
        """The program of a segment that an executable serves without padding."""
        return Program(
            loaded.execute,
            loaded.handlers,
            loaded.temporary_bytes,
            loaded.aliased_bytes,
            key,
            len(s.nodes),
            _last_line(s) or "",
            executable=loaded.executable,
        )

    def key(self, s: Segment, segment: str, constants: list[float | int | None]) -> str:
        """The cache key of a program: what it computes, and what compiles and runs it."""
        return fingerprint(
            segment=segment,
            constants=repr(constants),
            device=self._client.device_key(s.device),
            platform=self._client.version,
            versions=source_versions(),
            kernels=implementations.sources(),
        )

    def _key(self, s: Segment) -> str:
        return self.key(s, s.key, s.constants())

    @staticmethod
    def _ops(s: Segment) -> str:
        names = list(dict.fromkeys(n.name for n in s.nodes))
        return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")

    def _from_disk(self, key: str, device: Any) -> Any:
        entry = self._store.get(key) if self._store else None
        if entry is None:
            return None
        try:
            return pjrt.deserialize(entry.payload, device, self._client)
        except Exception as error:
            # Intact, but not of this jaxlib: its version should be in the key.
            warnings.warn(f"A cached executable could not be loaded: {error}", stacklevel=2)
            return None

    def _to_disk(self, key: str, executable: Any, s: Segment) -> None:
        if self._store is None:
            return
        try:
            payload = pjrt.serialize(executable)
        except Exception as error:  # some platforms cannot serialize; the program still runs
            logger.debug("not cached on disk: %s", error)
            return
        self._store.put(key, payload, self._manifest(s))

    def _manifest(self, s: Segment) -> dict[str, Any]:
        return {"ops": len(s.nodes), "names": self._ops(s), "platform": self._client.version}


def _last_line(s: Segment) -> str | None:
    return next((n.line for n in reversed(s.nodes) if n.line), None)


@functools.cache
def source_versions() -> str:
    """Versions of everything that decides what a recorded node means."""
    sources = f"{package_digest('tpu_core')} {_C.SOURCES}"
    return f"{torch.__version__} {version('jax')} {version('jaxlib')} {sources}"


def segment_failed(error: BaseException, exported: dict[str, Any]) -> BaseException:
    """The error that a failed segment raises, and that its results will raise when read."""
    if isinstance(error, TpuError) or not isinstance(error, Exception):
        return error
    s = Segment.from_export(exported)
    node = s.nodes[-1] if len(s.nodes) == 1 else None
    line = next((n.line for n in reversed(s.nodes) if n.line), None)
    mapped = map_xla_error(
        error,
        op=node.name if node else ProgramBuilder._ops(s),
        line=line,
        shapes=", ".join(f"{x.dtype}{list(x.shape)}" for x in s.slots if x.is_input)[:400],
    )
    mapped.__cause__ = error
    return mapped
