"""Waiting for a device: all of it, or up to an event.

A device runs what ops recorded in one order, so waiting for its newest result waits for everything;
what others send (`QUEUES`) and copies to pinned memory come on top.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tpu_core import _C
from tpu_core.host_copies import HOST_COPIES, Copy, wait
from tpu_core.interruptible import wait_for

# Of what else puts work on a device, by a thread of its own. Each returns when all that it was
# given has been sent, and gives the arrays that are computed last.
QUEUES: list[Callable[[], list[Any]]] = []
# Say whether an event that nobody takes the time of leaves what is recorded as it is until somebody
# asks for the event.
DEFERS: list[Callable[[], bool]] = []


def synchronize(device: int) -> None:
    """Wait until everything recorded for ``device`` has run; its errors are raised here."""
    _C.refuse_in_capture(device, "synchronize()")
    _C.flush_all(device, "synchronize")
    for array in _queued():
        _wait_for(array, device)
    _wait_for(_C.newest_array(device), device)
    HOST_COPIES.finish(device)
    _C.raise_checks(device, _C.launches())


def wait_for_launched(device: int) -> None:
    """Wait until all programs that were launched have run; what is recorded stays recorded.

    Raises nothing: errors are raised where results are read.
    """
    with contextlib.suppress(Exception):
        _wait_for(_C.newest_array(device), device)


def _queued() -> list[Any]:
    return [array for finish in QUEUES for array in finish()]


def _wait_for(array: Any, device: int) -> None:
    """Wait for a result, and where its memory was donated meanwhile, for what it was donated to."""
    from tpu_core.errors import map_xla_error

    while array is not None:
        try:
            wait_for(array)
            array.block_until_ready()
            return
        except Exception as error:
            newest = _C.newest_array(device)
            if not array.is_deleted():
                raise map_xla_error(error, stage="run") from error
            array = None if newest is array else newest


def is_ready(array: Any, device: int) -> bool:
    """Return whether a result is there, and where its memory was donated, what it was donated
    to.
    """
    while array is not None:
        try:
            return bool(array.is_ready())
        except Exception:
            newest = _C.newest_array(device)
            if not array.is_deleted():
                raise
            array = None if newest is array else newest
    return True


def query(device: int) -> bool:
    """Return whether the device is idle. Recorded ops are sent off first."""
    _C.refuse_in_capture(device, "query() of a stream")
    _C.flush_all(device, "stream query")
    copied = all(c.done() for c in HOST_COPIES.pending(device))
    arrays = [*_queued(), _C.newest_array(device)]
    return copied and all(is_ready(array, device) for array in arrays)


@dataclass(slots=True)
class Marker:
    """A recorded event: everything sent to the device before it.

    Attributes:
        arrays: Last results of the device; None until a deferred event is requested, which
            then is at the end of what was recorded by that time.
    """

    device: int
    arrays: list[Any] | None
    copies: list[Copy]
    timed: bool
    done: threading.Event | None = None
    time: float = 0.0
    launch: int = 0

    @staticmethod
    def record(device: int, timed: bool) -> Marker:
        """Mark the end of what was recorded so far."""
        marker = Marker(device, None, [], timed)
        if not timed and any(defers() for defers in DEFERS):
            return marker
        marker._place()
        if timed:
            marker.done = threading.Event()
            if marker.query():
                marker._finish()
            else:
                # Not a daemon: at the interpreter's exit it would be inside XLA.
                threading.Thread(target=marker._wait).start()
        return marker

    def _place(self) -> list[Any]:
        if self.arrays is None:
            _C.flush_all(self.device, "event")
            self.arrays = [*_queued(), _C.newest_array(self.device)]
            self.copies = HOST_COPIES.pending(self.device)
            self.launch = _C.launches()
        return self.arrays

    def _finish(self) -> None:
        self.time = time.perf_counter()
        if self.done:
            self.done.set()

    def _wait(self) -> None:
        with contextlib.suppress(Exception):  # raised where the marker is waited for
            self._block()
        self._finish()

    def _block(self) -> None:
        for array in self._place():
            _wait_for(array, self.device)
        wait(self.copies)

    def query(self) -> bool:
        """Return whether the device has passed the marker."""
        _C.refuse_in_capture(self.device, "query() of an event")
        arrays = self._place()
        copied = all(c.done() for c in self.copies)
        return copied and all(is_ready(array, self.device) for array in arrays)

    def synchronize(self) -> None:
        """Wait for the device to pass the marker."""
        _C.refuse_in_capture(self.device, "synchronize() of an event")
        self._block()
        if self.done:
            self.done.wait()
        _C.raise_checks(self.device, self.launch)

    def elapsed(self, end: Marker) -> float:
        """Milliseconds between two timed markers."""
        if self.done is None or end.done is None:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        self.synchronize()
        end.synchronize()
        return (end.time - self.time) * 1e3
