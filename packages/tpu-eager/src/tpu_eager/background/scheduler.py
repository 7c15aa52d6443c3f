"""Background compilation: segments run op by op while worker processes compile.

A new segment runs op by op where that costs little compiling, because nearly all its ops have
programs of their own, in memory or on disk. At its second time its own program is begun in a
worker, and takes over when it is there; what does not come again is never compiled as a whole.
"""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from tpu_core.config import config
from tpu_core.errors import BackgroundCompileWarning
from tpu_core.extend import (
    BuildContext,
    CompileJob,
    Node,
    Program,
    ProgramProvider,
    ProgramRequest,
    Segment,
)
from tpu_eager.background.pool import InProcess, WorkerProcess, Workers
from tpu_eager.background.worker import Result
from tpu_eager.costs import compile_seconds

logger = logging.getLogger("tpu_core")  # whose level is TPU_LOG

# Seconds on one core; see docs/adr/0007-background-compilation.md.
_LOADED_PROGRAM = 0.004
# Pieces are run where compiling those that lack costs at most this share of compiling the whole.
_SHARE = 0.25
_MOST_MISSING = 10  # pieces to compile: on a TPU each takes longer than on the CPU platform

_MOST_SEGMENTS = 4096
_REASON = "it came again; until now it ran op by op"


class _Stage(Enum):
    SEEN = auto()  # once
    COMPILING = auto()
    READY = auto()
    BLOCKING = auto()  # a worker could not do it: the next use compiles it
    PIECES = auto()  # it ended its worker: it stays op by op


@dataclass(slots=True)
class _Known:
    """A segment that runs op by op.

    Attributes:
        numbers: Its numbers when it was seen last.
        lifted: For each number whether it was seen to vary.
        ready: (cache key, executable), once compiled.
    """

    numbers: list[Any]
    lifted: list[bool]
    stage: _Stage = _Stage.SEEN
    ready: tuple[str, Any] | None = field(default=None, repr=False)


class Background(ProgramProvider):
    """Decides which segments run op by op, and has their programs made.

    With ``TPU_COMPILE=blocking`` none do.

    Args:
        context: The client's.
    """

    def __init__(self, context: BuildContext) -> None:
        self._context = context
        # A TPU and a GPU are opened by one process.
        on_cpu = context.client.platform.name == "cpu"
        start = WorkerProcess if on_cpu else functools.partial(InProcess, context.client)
        self.workers = Workers(config().compile_workers, start)
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def provide(self, request: ProgramRequest) -> Program | list[Any] | None:
        """The program that was compiled meanwhile, or none of its parts: op by op."""
        missing = request.missing if config().compile == "background" else None
        if missing is not None:
            request.segment = self._with_lifted(request.segment)
        s = request.segment
        key = self._context.exact_key(s)
        if (loaded := self._take(s, key)) is not None:
            return self._context.exact_program(request, loaded, key)
        if missing is None or not request.may_wait:
            return None
        pieces = missing()
        lacking = [
            (self._context.key(s, k, s.constants_of(node)), s.nodes[node])
            for k, node in pieces
            if not any(provider.serves(s.piece(node, k)) for provider in request.providers)
        ]
        if not self._serves_op_by_op(
            s, key, lacking, functools.partial(CompileJob.of, s, request.exported)
        ):
            return None
        if pieces:  # programs to compile
            self._context.note_program(s)
        return []

    def due(self, segment_key: str) -> bool:
        """Return whether a segment that runs op by op is to be asked about again."""
        if config().compile != "background":
            return True
        known = self._known.get(segment_key)
        return known is None or known.stage not in (_Stage.COMPILING, _Stage.PIECES)

    def close(self) -> None:
        """End the processes that compile."""
        self.workers.close()

    def _with_lifted(self, s: Segment) -> Segment:
        """The segment with those numbers as inputs that were seen to vary."""
        known = self._known.get(s.key)
        if known is None:
            return s
        with self._lock:
            known.lifted = [
                was or now.value != before.value
                for was, now, before in zip(known.lifted, s.numbers, known.numbers)
            ]
            known.numbers = s.numbers
        return s.with_numbers(
            [
                replace(n, compiled_in=n.compiled_in and not lifted)
                for n, lifted in zip(s.numbers, known.lifted)
            ]
        )

    def _take(self, s: Segment, key: str) -> Any:
        """The executable of ``key`` if it was compiled meanwhile, else None."""
        with self._lock:
            known = self._known.get(s.key)
            if known is None or known.ready is None or known.ready[0] != key:
                return None
            del self._known[s.key]
            return known.ready[1]

    def _serves_op_by_op(
        self, s: Segment, key: str, missing: list[tuple[str, Node]], job: Callable[[], CompileJob]
    ) -> bool:
        """Return whether a segment that has no program runs op by op this time.

        Args:
            s: The segment, with the numbers as inputs that vary.
            key: Cache key of its program.
            missing: Ops that have no program in memory, with their cache keys.
            job: Gives what a worker needs.
        """
        forbidden = not self._context.may_compile
        with self._lock:
            known = self._known.get(s.key)
            if forbidden and missing:
                return False
            if known is None:
                if self._context.is_stored(key) or not self._is_cheap(s, missing):
                    return False
                self._known[s.key] = _Known(s.numbers, [False] * len(s.numbers))
                while len(self._known) > _MOST_SEGMENTS:
                    self._known.popitem(last=False)
                return True
            if known.stage is _Stage.BLOCKING:
                return False
            if forbidden or known.stage in (_Stage.COMPILING, _Stage.PIECES):
                return True
            known.stage, known.ready = _Stage.COMPILING, None
        self._context.note_pending(1)
        self.workers.submit(job, lambda result: self._compiled(s, known, key, result))
        return True

    def _is_cheap(self, s: Segment, missing: list[tuple[str, Node]]) -> bool:
        to_compile = [node for key, node in missing if not self._context.is_stored(key)]
        if len(to_compile) > _MOST_MISSING:
            return False
        loads = _LOADED_PROGRAM * (len(missing) - len(to_compile))
        compiles = sum(compile_seconds([node]) for node in to_compile)
        return loads + compiles <= _SHARE * compile_seconds(s.nodes)

    def _compiled(self, s: Segment, known: _Known, key: str, result: Result) -> None:
        self._context.note_pending(-1)
        executable, problem = None, result.error
        if result.payload is not None:
            try:
                executable = self._context.adopt(s, key, result.payload, result.seconds, _REASON)
            except Exception as error:  # compiled here then, and raised where it belongs
                problem = f"{type(error).__name__}: {error}"
        with self._lock:
            if executable is not None:
                known.stage, known.ready = _Stage.READY, (key, executable)
            else:
                known.stage = _Stage.PIECES if result.is_lost else _Stage.BLOCKING
        if result.is_lost:
            warnings.warn(
                BackgroundCompileWarning(
                    f"The process that compiled {len(s.nodes):,} ops ended twice; they run op by "
                    f"op.",
                    line=s.nodes[-1].line or None,
                ),
                stacklevel=2,
            )
        elif executable is None:
            logger.info("not compiled in the background: %s", problem)
