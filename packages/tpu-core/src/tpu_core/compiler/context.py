"""The way to an executable, for all program providers of a client: the cache, else XLA."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tpu_core import _C, gc_control, interruptible
from tpu_core.cache.fingerprint import fingerprint
from tpu_core.cache.store import ExecutableStore
from tpu_core.cache.tiers import TieredStore
from tpu_core.compiler import cross_compile, dumps
from tpu_core.compiler import segment as segments
from tpu_core.compiler.host_parts import may_run_on_host
from tpu_core.compiler.memory_maps import MemoryMaps
from tpu_core.compiler.programs import (
    Program,
    compiling_is_allowed,
    require_compiling_allowed,
    source_versions,
)
from tpu_core.compiler.providers import ProgramProvider, ProgramRequest
from tpu_core.compiler.reasons import Reason, Reasons, listing
from tpu_core.compiler.segment import Node, Segment
from tpu_core.errors import map_xla_error
from tpu_core.interruptible import InterruptibleCalls
from tpu_core.logs import warn_at
from tpu_core.lowering import implementations
from tpu_core.metrics import METRICS, CompileEvent, Source
from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt.host_memory import give_back_free_memory

# Ops of a program that is a training step, say, whose temporaries fill a good part of the memory.
_LARGE = 64


class BuildContext:
    """Keys, the cache, compiling and reasons, shared by the providers of a client.

    Args:
        client: The PJRT client.
        store: The cache beyond this process, or None.

    Attributes:
        on_program: Called with the segment of each program that was compiled or loaded.

    Example:
        >>> key, reason = context.exact_key(segment), context.explain(segment)
        >>> loaded = context.obtain(segment, key, lower, segment.outputs(), reason)
        >>> program = context.program(segment, loaded, key)
    """

    def __init__(self, client: pjrt.Client, store: ExecutableStore | TieredStore | None) -> None:
        self.client = client
        self.store = store
        self.on_program: list[Callable[[Segment], None]] = []
        self._reasons = Reasons()
        self._compiles = InterruptibleCalls("tpu compile")
        self._maps = MemoryMaps()

    @property
    def may_compile(self) -> bool:
        """True if a compile would not raise `RecompilationError`."""
        return compiling_is_allowed()

    def key(self, s: Segment, segment: str, constants: list[float | int | None]) -> str:
        """The cache key of a program: what it computes, and what compiles and runs it.

        Args:
            s: The segment, of which only the device counts.
            segment: A text that says what the program computes, but for the constants.
            constants: Numbers compiled in.
        """
        parts: dict[str, Any] = {
            "segment": segment,
            "constants": repr(constants),
            "versions": source_versions(),
            "kernels": implementations.sources(),
        }
        device, platform = self.client.device_key(s.device), self.client.version
        key = fingerprint(**parts, device=device, platform=platform)
        if (cross := cross_compile.active()) is not None:
            cross.note(key, parts)
        return key

    def exact_key(self, s: Segment) -> str:
        """The cache key of the program that runs a segment as it was recorded."""
        return self.key(s, s.key, s.constants())

    def is_stored(self, key: str) -> bool:
        """Return whether a program is in the cache of this machine."""
        disk = self._disk()
        return disk is not None and disk.path(key).exists()

    def store_data(self, key: str, payload: bytes, manifest: dict[str, Any]) -> None:
        """Keep what belongs to programs in the cache, that of a cross compiler's target included.

        Args:
            key: As `key` gives it.
            payload: Does not depend on the platform.
            manifest: Shown by `tpu cache ls`.
        """
        if self.store is not None:
            self.store.put(key, payload, {**manifest, "platform": self.client.version})
        if (cross := cross_compile.active()) is not None:
            cross.add_data(key, payload, manifest)

    def drop(self, key: str) -> None:
        """Take a program out of the cache of this machine."""
        disk = self._disk()
        if disk is not None:
            disk.path(key).unlink(missing_ok=True)

    def _disk(self) -> ExecutableStore | None:
        return self.store.disk if isinstance(self.store, TieredStore) else self.store

    def explain(self, s: Segment) -> Reason:
        """Reason that a segment is new."""
        return self._reasons.explain(s)

    def remember(self, s: Segment) -> None:
        """Take note of a segment, for what is new in the next."""
        self._reasons.remember(s)

    def note_program(self, s: Segment) -> None:
        """Count a program among those of the segment's line."""
        for note in self.on_program:
            note(s)

    @staticmethod
    def note_pending(count: int) -> None:
        """Count compiles that began in the background, or that ended with -1."""
        METRICS.compiling(count)

    @staticmethod
    def warn(line: str | None, warning: Warning) -> None:
        """Show a warning at the user's line, as ``Node.line`` has it."""
        warn_at(line, warning)

    @staticmethod
    def may_run_on_host(node: Node, products: bool = False) -> bool:
        """Return whether a node may be in a part for CPU kernels: ``products`` only on request."""
        return may_run_on_host(node, products)

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

        Raises:
            CompilationError: A lowering or XLA failed, where the error names op and line, or there
                are too many programs.
            RecompilationError: It would have to be compiled, and that is forbidden.
        """
        if (cross := cross_compile.active()) is not None:
            cross.add(key, lower, self._manifest(s))
        device = self.client.devices[s.device]
        started = time.perf_counter()
        large = len(s.nodes) >= _LARGE
        if large:
            give_back_free_memory()
        self._maps.check(s.last_line)
        executable = self._from_disk(key, device)
        source: Source = "disk"
        if executable is None:
            require_compiling_allowed(reason.text, len(s.nodes), reason.line or s.last_line)
            METRICS.cache_miss()
            source = "compiled"
            module = lower()
            dumps.lowered(key, module, listing(s))
            try:
                executable = self._compiles.run(
                    key, lambda: pjrt.compile_module(module, device, self.client)
                )
            except Exception as error:
                interruptible.pass_on(error)
                raise map_xla_error(
                    error, op=s.op_names(), line=s.last_line, stage="compile"
                ) from error
            dumps.compiled(key, executable)
        loaded = pjrt.load(executable, outputs, device)
        if large:
            give_back_free_memory()
        seconds = time.perf_counter() - started
        METRICS.compiled(_event(s, key, seconds, reason, source))
        self.note_program(s)
        if source == "compiled":
            _C.note_compile(len({id(n.plan) for n in s.nodes}), len(s.nodes), seconds)
            # Before the first run: XLA:CPU does not serialize a sort whose comparison was resolved.
            payload = self.store and pjrt.serialized_for_cache(executable)
            if check is not None:
                check(loaded)
            if self.store and payload:
                self.store.put(key, payload, self._manifest(s))
        return loaded

    def adopt(
        self, s: Segment, key: str, payload: bytes, seconds: float, reason: str
    ) -> pjrt.Loaded:
        """An executable that was compiled in the background, which goes into the cache.

        Args:
            s: The segment to run.
            key: Its key in the cache.
            payload: The serialized executable.
            seconds: Time that compiling it took.
            reason: Reason of the compile.
        """
        device = self.client.devices[s.device]
        executable = pjrt.deserialize(payload, device, self.client)
        if self.store is not None:
            self.store.put(key, payload, self._manifest(s))
        loaded = pjrt.load(executable, s.outputs(), device)
        METRICS.cache_miss()
        why = Reason(reason, s.nodes[-1].line or None)
        METRICS.compiled(_event(s, key, seconds, why, "background"))
        self.note_program(s)
        return loaded

    def program(self, s: Segment, loaded: pjrt.Loaded, key: str) -> Program:
        """The program of a segment that an executable serves without padding."""
        return Program(
            loaded.execute,
            loaded.handlers,
            loaded.temporary_bytes,
            loaded.aliased_bytes,
            key,
            len(s.nodes),
            s.last_line or "",
            executable=loaded.executable,
        )

    def exact_program(self, request: ProgramRequest, loaded: pjrt.Loaded, key: str) -> Program:
        """The program that answers a request by running the segment as it was recorded."""
        s = request.segment
        self.remember(s)
        gc_control.resume()
        program = self.program(s, loaded, key)
        program = replace(program, compiled_in=[n.compiled_in for n in s.numbers])
        for provider in request.providers:
            provider.note_exact(s, program)
        return program

    def _from_disk(self, key: str, device: Any) -> Any:
        entry = self.store.get(key) if self.store else None
        if entry is None:
            return None
        try:
            return pjrt.deserialize(entry.payload, device, self.client)
        except Exception as error:
            interruptible.pass_on(error)
            # Intact, but not of this jaxlib: its version should be in the key.
            warnings.warn(f"A cached executable could not be loaded: {error}", stacklevel=2)
            return None

    def _manifest(self, s: Segment) -> dict[str, Any]:
        return {"ops": len(s.nodes), "names": s.op_names(), "platform": self.client.version}


class ExactPrograms(ProgramProvider):
    """Compiles segments as they were recorded, or loads what was compiled so."""

    def __init__(self, context: BuildContext) -> None:
        self._context = context

    def provide(self, request: ProgramRequest) -> Program:
        """The program of the segment.

        Raises:
            CompilationError: A lowering or XLA failed; the error names op and line.
            RecompilationError: It would have to be compiled, and that is forbidden.
        """
        context, s = self._context, request.segment
        reason = context.explain(s)
        for provider in request.providers:
            reason = provider.comment(s, reason)
        key = context.exact_key(s)
        lower = functools.partial(segments.lower, s)
        loaded = context.obtain(s, key, lower, s.outputs(), reason)
        return context.exact_program(request, loaded, key)


def _event(s: Segment, key: str, seconds: float, reason: Reason, source: Source) -> CompileEvent:
    line = reason.line or s.last_line
    return CompileEvent(
        seconds, reason.text, source, len(s.nodes), line, key, cut=s.cut, contents=listing(s)
    )
