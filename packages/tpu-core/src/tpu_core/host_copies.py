"""Copies from the device to pinned memory that run while the device goes on.

They are made in order by one thread, and are there once their device was synchronised, or an event
that was recorded after them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

Copy = Future[None]


class HostCopies:
    """The copies under way, by device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._pending: dict[int, list[Copy]] = {}

    def start(self, array: Any, host: torch.Tensor, device: int) -> None:
        """Copy an array into ``host``, a pinned CPU tensor of its shape, once it is computed.

        Args:
            array: Must not be donated before.
            host: Is converted to, where its dtype is another one.
            device: Index of the array's device.
        """
        from tpu_core.errors import map_xla_error
        from tpu_core.metrics import METRICS
        from tpu_core.pjrt import client as pjrt
        from tpu_core.pjrt import padded_array as arrays

        # The caller's call has counted the write already, as autograd sees it.
        memory = host.data

        def copy() -> None:
            try:
                read = pjrt.fetch(arrays.on_host(array))
            except Exception as error:
                raise map_xla_error(error, stage="run") from error
            METRICS.d2h(read.nbytes)
            memory.copy_(read)

        with self._lock:
            if self._executor is None:
                # The interpreter waits for its threads before it ends.
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="tpu copies")
            under_way = [c for c in self._pending.get(device, ()) if not _succeeded(c)]
            self._pending[device] = [*under_way, self._executor.submit(copy)]

    def pending(self, device: int) -> list[Copy]:
        """The copies from a device that were begun and not waited for."""
        return list(self._pending.get(device, ()))

    def finish(self, device: int | None = None) -> None:
        """Wait for the copies from a device, or from all.

        Raises:
            TpuError: The value to copy could not be computed.
        """
        with self._lock:
            devices = list(self._pending) if device is None else [device]
            copies = [c for d in devices for c in self._pending.pop(d, ())]
        wait(copies)


def wait(copies: Sequence[Copy]) -> None:
    """Wait for all, then raise the first error."""
    errors = [c.exception() for c in copies]
    for error in errors:
        if error is not None:
            raise error


def _succeeded(copy: Copy) -> bool:
    return copy.done() and copy.exception() is None


HOST_COPIES = HostCopies()
