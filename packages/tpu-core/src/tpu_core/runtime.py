"""Starts the device on first use, and answers the extension's questions about it."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tpu_core import _C, modes, platforms
from tpu_core.config import config
from tpu_core.errors import ForkedProcessError

_lock = threading.RLock()
_state: Runtime | None = None
_owner = 0


@dataclass(slots=True)
class Runtime:
    """The running device.

    Attributes:
        client: The PJRT client.
        builder: Makes programs for segments.
        store: The cache beyond this process, or None.
    """

    client: Any
    builder: Any
    store: Any


def device_count() -> int:
    """Number of devices, without starting anything."""
    return platforms.device_count()


def is_initialized() -> bool:
    """Whether the device was used in this process."""
    return _state is not None and _owner == os.getpid()


def initialize() -> Runtime:
    """Start the runtime; called by the extension on the device's first use.

    Raises:
        ForkedProcessError: This process was forked from one that had used the device.
        TpuNotAvailableError: The platform cannot be started.
    """
    global _state, _owner
    if _state is not None:
        if _owner != os.getpid():
            raise ForkedProcessError(
                "This process was forked from one that had already used device 'tpu'."
            )
        return _state
    with _lock:
        if _state is not None:
            return _state
        with _collector_paused():
            _state = _start()
        _owner = os.getpid()
    return _state


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Importing jax makes a million objects that stay; looking for garbage among them takes a
    quarter of the start.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                # All that is there joins the oldest generation, which is rarely looked through;
                # as young objects they would be, in the first step.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _start() -> Runtime:
    platforms.resolve()  # raises where there is no device, before anything slow is imported

    from tpu_core import checkpointing, host_reads, input_pipeline, logs, lowering
    from tpu_core.cache.tiers import open_store, remembered_names
    from tpu_core.compiler import programs
    from tpu_core.lowering.registry import REGISTRY
    from tpu_core.metrics import METRICS
    from tpu_core.padding import arrays
    from tpu_core.pjrt import client as pjrt
    from tpu_core.recorder import describe, miss, variants

    logs.configure()
    client = pjrt.start()
    _keep_workers_quiet()
    lowering.load()
    store = open_store(config())
    builder = programs.ProgramBuilder(client, store)
    runtime = Runtime(client, builder, store)
    devices = client.devices

    _C.set_callbacks(
        {
            "describe": describe.describe,
            "miss": miss.miss,
            "compile": builder.build,
            "check_memory": programs.check_memory,
            "segment_failed": programs.segment_failed,
            "inspect": _inspect,
            "pack": lambda kind, data, device: pjrt.put_numbers(kind, data, devices[device]),
            "device_put": lambda tensor, device: pjrt.put_tensor(tensor, devices[device]),
            "move": lambda array, device: arrays.moved(array, devices[device]),
            "padded_array": arrays.PaddedArray,
            "exact": lambda array, device: arrays.exact(array, devices[device]),
            "to_host": host_reads.to_host,
            "note_read": host_reads.note_read,
            "memory_info": memory_info,
            "event_record": Marker.record,
            "event_query": Marker.query,
            "event_synchronize": Marker.synchronize,
            "event_elapsed": Marker.elapsed,
            "synchronize": synchronize,
            "query": query,
        }
    )
    # Working them out takes a fifth of the start.
    overloads = remembered_names(
        store,
        variants.recorded_overloads,
        versions=programs.source_versions(),
        lowerings=" ".join(entry.op for entry in REGISTRY),
    )
    _C.register_overloads(overloads)
    _C.set_internal_prefixes(
        tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))
    )
    _C.set_default_mode(modes.current().native())
    METRICS.set_source(_C.counters)
    METRICS.set_runs(_C.program_runs)
    input_pipeline.watch()
    checkpointing.watch()
    atexit.register(_C.wait_for_autograd)
    return runtime


def _keep_workers_quiet() -> None:
    """Silence jax's warning where `multiprocessing` forks, as a `DataLoader` does for each worker.

    Such a worker has no use for the device; one that uses it gets a `ForkedProcessError`.
    """
    warnings.filterwarnings(
        "ignore", r"os\.fork\(\) was called", RuntimeWarning, r"multiprocessing\.popen_fork"
    )


def runtime() -> Runtime:
    """The running device, started if need be."""
    return initialize()


def _inspect(
    exported: dict[str, Any],
    inputs: list[Any],
    outputs: list[Any],
    inspect: modes.Inspect | None,
) -> None:
    for a in outputs:
        a.block_until_ready()
    if inspect is not None:
        from tpu_core.compiler.segment import Segment
        from tpu_core.padding import arrays

        device = runtime().client.devices[exported["device"]]
        inputs = [arrays.exact(a, device) for a in inputs]
        inspect(Segment.from_export(exported), inputs, outputs)


def synchronize(device: int) -> None:
    """Wait until everything recorded for ``device`` has run; its errors are raised here."""
    _C.flush_all(device, "synchronize")
    _wait_for(_C.newest_array(device), device)


def _wait_for(array: Any, device: int) -> None:
    """Wait for a result, and where its memory was donated meanwhile, for what it was donated to."""
    from tpu_core.xla_status import map_xla_error

    while array is not None:
        try:
            array.block_until_ready()
            return
        except Exception as error:
            newest = _C.newest_array(device)
            if not array.is_deleted():
                raise map_xla_error(error, stage="run") from error
            array = None if newest is array else newest


def _is_ready(array: Any, device: int) -> bool:
    """Whether a result is there, and where its memory was donated, what it was donated to."""
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
    """Whether the device is idle. Recorded ops are sent off first."""
    _C.flush_all(device, "stream query")
    return _is_ready(_C.newest_array(device), device)


def memory_info(device: int) -> tuple[int, int]:
    """(free, total) bytes of a device; on the CPU platform the limit, or the machine's memory."""
    used = _C.allocated_bytes(device)
    limit = config().memory_limit
    if limit is None and is_initialized():
        stats = runtime().client.devices[device].memory_stats()
        if stats and "bytes_limit" in stats:
            limit, used = stats["bytes_limit"], stats.get("bytes_in_use", used)
    total = limit if limit is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(total - used, 0), total


@dataclass(slots=True)
class Marker:
    """A recorded event: everything sent to the device before it."""

    device: int
    array: Any
    timed: bool
    done: threading.Event | None = None
    time: float = 0.0

    @staticmethod
    def record(device: int, timed: bool) -> Marker:
        """Mark the end of what was recorded so far."""
        _C.flush_all(device, "event")
        marker = Marker(device, _C.newest_array(device), timed)
        if timed:
            marker.done = threading.Event()
            if marker.query():
                marker._finish()
            else:
                # Not a daemon: at the interpreter's exit it would be inside XLA.
                threading.Thread(target=marker._wait).start()
        return marker

    def _finish(self) -> None:
        self.time = time.perf_counter()
        if self.done:
            self.done.set()

    def _wait(self) -> None:
        self._block()
        self._finish()

    def _block(self) -> None:
        _wait_for(self.array, self.device)

    def query(self) -> bool:
        """Whether the device has passed the marker."""
        return _is_ready(self.array, self.device)

    def synchronize(self) -> None:
        """Wait for the device to pass the marker."""
        self._block()
        if self.done:
            self.done.wait()

    def elapsed(self, end: Marker) -> float:
        """Milliseconds between two timed markers."""
        if self.done is None or end.done is None:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        self.synchronize()
        end.synchronize()
        return (end.time - self.time) * 1e3
