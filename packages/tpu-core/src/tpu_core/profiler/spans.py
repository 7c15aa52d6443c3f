"""Rows of work that other packages give to the device, such as collectives."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tpu_core.profiler.rows import Kind, Row, Tracks, op_name

_spans: list[Span] = []
_is_taken = False


@dataclass(slots=True)
class Span:
    """Work from one time to another, nanoseconds since the epoch.

    Attributes:
        name: Name of its row.
        line: The user's.
        track: Name of the device's track.
        device: Index.
        metadata: Shown with the row.
    """

    name: str
    line: str
    track: str
    device: int
    metadata: dict[str, Any]
    start: int
    end: int = 0


def begin() -> None:
    """Take spans from now on."""
    global _is_taken
    _spans.clear()
    _is_taken = True


def end() -> None:
    """Take none any more."""
    global _is_taken
    _is_taken = False


@contextmanager
def _taken(span: Span, results: Callable[[], Sequence[Any]]) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # is raised where a result is read
            for array in results():
                array.block_until_ready()
        span.end = time.time_ns()
        _spans.append(span)


def work(
    name: str,
    line: str | None,
    track: str,
    results: Callable[[], Sequence[Any]],
    device: int = 0,
    **metadata: Any,
) -> contextlib.AbstractContextManager[None]:
    """A row for what the block gives to the device, while a profile is taken.

    Args:
        name: Name of the row.
        line: The user's.
        track: Name of the device's track.
        results: Gives the arrays that are computed last; the profile waits for them.
        device: Index of the device.
        metadata: Shown with the row.

    Example:
        >>> with profile_work("all_reduce", None, "Collectives", lambda: arrays):
        ...     arrays = executor.run(operands)
    """
    if not _is_taken:
        return contextlib.nullcontext()
    return _taken(Span(name, line or "", track, device, metadata, time.time_ns()), results)


def rows(tracks: Tracks) -> Iterator[Row]:
    """The rows of what was taken."""
    for span in _spans:
        yield Row(
            Kind.OP,
            op_name(span.name, span.line),
            span.start,
            span.end,
            span.device,
            tracks.number(span.device, span.track),
            metadata={"op": span.name, "line": span.line, **span.metadata},
        )
