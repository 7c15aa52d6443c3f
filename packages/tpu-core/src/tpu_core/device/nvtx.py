"""The module ``torch.tpu.nvtx``: ranges and marks under the names of ``torch.cuda.nvtx``.

They are rows of the host in `torch.profiler` and in the files of `torch.tpu.profiler.trace`. Like
CUDA's they say when the host recorded work, not when the device ran it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tpu_core.profiler.annotations import annotate

__all__ = ["mark", "range", "range_end", "range_pop", "range_push", "range_start"]


class _Ranges(threading.local):
    """The nested ranges of a thread."""

    def __init__(self) -> None:
        self.open: list[AbstractContextManager[None]] = []


_ranges = _Ranges()
_started: dict[int, AbstractContextManager[None]] = {}
_handles = itertools.count(1)


def range_push(msg: str) -> int:
    """Begin a range inside those of this thread; returns its depth, 0 for the outermost.

    Args:
        msg: Name of the row.

    Example:
        >>> torch.tpu.nvtx.range_push("forward")
        0
    """
    entered = annotate(msg)
    entered.__enter__()
    _ranges.open.append(entered)
    return len(_ranges.open) - 1


def range_pop() -> int:
    """End the innermost range of this thread; returns its depth.

    Raises:
        RuntimeError: None is open.
    """
    if not _ranges.open:
        raise RuntimeError("range_pop() without a range_push() in this thread.")
    _ranges.open.pop().__exit__(None, None, None)
    return len(_ranges.open)


def range_start(msg: str) -> int:
    """Begin a range that may overlap others; returns its handle for `range_end`.

    Args:
        msg: Name of the row.
    """
    entered, handle = annotate(msg), next(_handles)
    entered.__enter__()
    _started[handle] = entered
    return handle


def range_end(range_id: int) -> None:
    """End a range that `range_start` began, in the same thread.

    Args:
        range_id: Its handle.

    Raises:
        RuntimeError: No open range has the handle.
    """
    entered = _started.pop(range_id, None)
    if entered is None:
        raise RuntimeError(f"No range with the handle {range_id} is open.")
    entered.__exit__(None, None, None)


def mark(msg: str) -> None:
    """Add a row without a length.

    Args:
        msg: Name of the row.
    """
    with annotate(msg):
        pass


@contextmanager
def range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Range of a block or, as a decorator, of each call of a function.

    Args:
        msg: Name of the row.
        args, kwargs: For ``msg.format``.

    Example:
        >>> with torch.tpu.nvtx.range("layer {}", 7):
        ...     x = layer(x)
    """
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()
