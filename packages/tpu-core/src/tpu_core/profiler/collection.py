"""Collect the device's rows of a profile; the extension calls `start`, `stop` and `rows`."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tpu_core import _C, runtime
from tpu_core.profiler import spans
from tpu_core.profiler.events import Events, Launch
from tpu_core.profiler.rows import Row, Tracks

_lock = threading.RLock()
_profile: Profile | None = None
_kept: list[list[Taken]] = []


@dataclass(frozen=True, slots=True)
class Taken:
    """A finished profile.

    Attributes:
        xspace: XLA's trace, empty where the device was not used.
        rows, tracks: The rows of the device.
        started: Time at which XLA's trace began, nanoseconds since the epoch.
    """

    xspace: bytes
    rows: list[Row]
    tracks: Tracks
    started: int


@contextmanager
def keeping() -> Iterator[list[Taken]]:
    """Keep the profiles that end in the block.

    Yields:
        A list that they are added to.
    """
    kept: list[Taken] = []
    _kept.append(kept)
    try:
        yield kept
    finally:
        _kept.remove(kept)


class Profile:
    """A profile that is being taken.

    Attributes:
        started, ended: Seconds since the epoch.
        trace_started: Time at which XLA's trace began, nanoseconds since the epoch.
        xspace: XLA's trace, once it has ended.
    """

    def __init__(self) -> None:
        self.started = time.time()
        self.ended = 0.0
        self.trace_started = time.time_ns()
        self.xspace: bytes | None = None
        self._trace: Any = None

    def start_trace(self) -> None:
        """Start XLA's trace, if the device has started."""
        if self._trace is not None or not runtime.is_initialized():
            return
        from tpu_core import synchronization
        from tpu_core.pjrt.profiling import TraceSession

        for device in range(runtime.device_count()):
            synchronization.wait_for_launched(device)  # earlier programs are none of the profile
        self._trace = TraceSession()

    def stop(self) -> None:
        """Wait for the device, and end XLA's trace."""
        from tpu_core import synchronization

        if runtime.is_initialized():
            for device in range(runtime.device_count()):
                synchronization.synchronize(device)
        trace, self._trace = self._trace, None
        self.ended = time.time()
        if trace is None:
            return
        try:
            self.xspace = trace.stop()
        except RuntimeError as error:
            warnings.warn(
                f"The profile has no rows of XLA ops: {error} Only one trace of XLA's can be taken "
                "at a time; is jax.profiler taking another?",
                stacklevel=2,
            )

    def rows(self, raw: dict[str, Any]) -> tuple[list[Row], Tracks]:
        """The rows, and the tracks that they are on.

        Args:
            raw: Records of the extension.
        """
        from tpu_core.metrics import METRICS
        from tpu_core.profiler import host_rows

        tracks = Tracks()
        flows = itertools.count(1)
        noted = Events.read(raw)
        found = list(self._xla_rows(noted.launches, tracks, flows))
        found += host_rows.op_rows(noted.host_ops, tracks, flows)
        found += host_rows.transfer_rows(noted.transfers, tracks)
        found += spans.rows(tracks)
        ready = [e for e in METRICS.compile_events() if self.started <= e.time <= self.ended]
        found += host_rows.compile_rows(ready, tracks)
        return found, tracks

    def _xla_rows(
        self, launches: list[Launch], tracks: Tracks, flows: Iterator[int]
    ) -> Iterator[Row]:
        if not runtime.is_initialized():
            return
        from tpu_core.pjrt import profiling
        from tpu_core.profiler import xla_rows

        programs = xla_rows.Programs(runtime.runtime().client.backend)
        found = []
        if self.xspace:
            traced = profiling.read(self.xspace)
            self.trace_started = traced.started
            found = xla_rows.runs(traced, launches, programs)
        yield from xla_rows.rows(found, programs, tracks, flows)
        shown = {id(run.launch) for run in found}
        for launch in launches:
            if id(launch) not in shown:
                yield xla_rows.launch_row(launch)


def start() -> None:
    """Begin a profile."""
    global _profile
    with _lock:
        _profile = Profile()
        spans.begin()
        _profile.start_trace()


def device_started() -> None:
    """Take XLA's trace too, in a profile that began before the device was used."""
    with _lock:
        if _profile is not None and not _profile.ended:
            _profile.start_trace()


def stop() -> None:
    """End the profile, once the device has done what it was given."""
    with _lock:
        try:
            if _profile is not None:
                _profile.stop()
        finally:
            spans.end()


def rows() -> dict[str, Any]:
    """Rows for Kineto, with the names of the devices and tracks that they are on."""
    with _lock:
        raw = _C.take_profile()
        if _profile is None:
            return {"rows": [], "devices": [], "resources": []}
        found, tracks = _profile.rows(raw)
        taken = Taken(_profile.xspace or b"", found, tracks, _profile.trace_started)
        for kept in _kept:
            kept.append(taken)
        _profile.xspace = None
        resources = list(tracks.all())
        devices = sorted({device for device, _, _ in resources})
        return {
            "rows": [row.native() for row in found],
            "devices": [(d, f"tpu:{d}") for d in devices],
            "resources": resources,
        }
