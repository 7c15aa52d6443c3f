"""Find out whether the device waits for the `DataLoader`, and say so once.

PyTorch has no hook for this, so the iterators' ``__next__`` is wrapped when the device starts. Most
batches are only counted. Now and then `BATCHES` in a row are measured: how long ``__next__`` took
while the device had nothing left to run. A thread that waits for the device finds out since when.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from tpu_core import _C
from tpu_core.config import config
from tpu_core.errors import InputPipelineWarning
from tpu_core.logs import warn_at
from tpu_core.metrics import METRICS

BATCHES = 20
LEAST_SHARE = 0.2
LEAST_SECONDS = 1e-3  # a batch: below, the loop is a toy
_FIRST = 5  # batches before the first measurement; ten times as many before each further one


class Measurement:
    """Sums over batches in a row: how long they took, and how long the device waited for them.

    Args:
        programs: Programs run until it began.
        made: Programs compiled until then.
    """

    def __init__(self, programs: int, made: int) -> None:
        self.programs = programs
        self.made = made
        self.batches = 0
        self.seconds = 0.0
        self.waited = 0.0

    def add(self, previous: float, entered: float, left: float, idle: float | None) -> None:
        """Count a batch.

        Args:
            previous: Time at which the loader gave the batch before.
            entered, left: Times of the request for this one, and of its delivery.
            idle: Since when the device had nothing to run; None where it was busy all the time.
        """
        self.batches += 1
        self.seconds += left - previous
        if idle is not None:
            self.waited += max(left - max(entered, idle), 0.0)

    def verdict(self, programs: int, made: int) -> float | None:
        """The share of time that the device waited, where that is much and well measured."""
        # A compile is no step; and where few programs run, what was recorded waits to be cut.
        if made != self.made or (programs - self.programs) * 4 < self.batches:
            return None
        share = self.waited / self.seconds
        enough = share >= LEAST_SHARE and self.waited / self.batches >= LEAST_SECONDS
        return share if enough else None


class _Idle:
    """Since when the device is idle: at once, or found out by a thread that waits for it."""

    def __init__(self) -> None:
        array = _C.newest_array(_C.current_device())
        self._since: float | None = None
        if array is None or array.is_deleted() or array.is_ready():
            self._since = time.perf_counter()
        else:
            # Not a daemon: at the interpreter's exit it would be inside XLA.
            threading.Thread(target=self._wait, args=(array,)).start()

    def _wait(self, array: Any) -> None:
        try:
            array.block_until_ready()
        except Exception:  # it failed, which is said where it is read, or its memory is used anew
            return
        self._since = time.perf_counter()

    def since(self) -> float | None:
        """The time as of `time.perf_counter`; None where the device is busy."""
        return self._since


class InputPipeline:
    """Watches the batches that the main thread takes from all loaders."""

    def __init__(self) -> None:
        self.skip = _FIRST  # batches until the next measurement
        self._pause = _FIRST
        self._measured: Measurement | None = None
        self._previous = 0.0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def batch(self, loader: Any, get: Callable[[], Any]) -> Any:
        """The next batch, measured.

        Args:
            loader: The iterator.
            get: Gives its next batch.
        """
        if threading.current_thread() is not _MAIN or _C.in_bad_fork():
            return get()  # another thread fetches ahead; a worker process has no device
        if not config().performance_warnings:
            return get()
        entered, idle = time.perf_counter(), _Idle()
        data = get()
        left = time.perf_counter()
        if self._measured is None:
            self._begin()
        elif loader in self._known:  # the first batch of an epoch is not like the others
            self._measured.add(self._previous, entered, left, idle.since())
            if self._measured.batches == BATCHES:
                self._end(self._measured, loader)
        self._known.add(loader)
        self._previous = left
        return data

    def _begin(self) -> None:
        self._measured = Measurement(_C.counters()["executions"], METRICS.program_count())

    def _end(self, measured: Measurement, loader: Any) -> None:
        self._measured = None
        made = METRICS.program_count()
        if made != measured.made:
            return  # once more
        share = measured.verdict(_C.counters()["executions"], made)
        if share is None:
            self._pause *= 10
            self.skip = self._pause
            return
        self.skip = -1  # said, for good
        workers = getattr(loader, "_num_workers", 0)
        line = _C.user_line() or None
        warning = InputPipelineWarning(
            f"The device waits for the DataLoader {share:.0%} of the time.",
            values={
                "a batch": f"{measured.waited / BATCHES * 1e3:.1f} ms waited of "
                f"{measured.seconds / BATCHES * 1e3:.1f} ms, over {BATCHES} batches",
                "num_workers": workers,
            },
            line=line,
        )
        warn_at(line, warning)


_MAIN = threading.main_thread()
PIPELINE = InputPipeline()


def watch() -> None:
    """Wrap the iterators of `torch.utils.data.DataLoader`; a second call does nothing."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original = _BaseDataLoaderIter.__next__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def next_batch(self: Any) -> Any:
        if PIPELINE.skip:
            PIPELINE.skip -= PIPELINE.skip > 0
            return original(self)
        return PIPELINE.batch(self, functools.partial(original, self))

    setattr(_BaseDataLoaderIter, "__next__", next_batch)  # noqa: B010 (mypy minds the assignment)
