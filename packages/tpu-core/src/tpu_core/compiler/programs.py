"""Programs of segments, when they may be compiled, and the versions that their keys hold."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from tpu_core import _C
from tpu_core.cache.sources import package_digest
from tpu_core.compiler.segment import Segment
from tpu_core.errors import RecompilationError, TpuError, map_xla_error


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
    """Raise `RecompilationError` in the block wherever a program would be compiled."""
    global _forbidden
    with _forbidden_lock:
        _forbidden += 1
    try:
        yield
    finally:
        with _forbidden_lock:
            _forbidden -= 1


def compiling_is_allowed() -> bool:
    """Return whether no thread is inside ``torch.tpu.no_recompile()``."""
    return not _forbidden


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
    mapped = map_xla_error(
        error,
        op=node.name if node else s.op_names(),
        line=s.last_line,
        shapes=", ".join(f"{x.dtype}{list(x.shape)}" for x in s.slots if x.is_input)[:400],
    )
    mapped.__cause__ = error
    return mapped
