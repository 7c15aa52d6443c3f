"""The running device, and work that other threads send."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from tpu_core import _C, synchronization


def on_synchronize(
    finish: Callable[[], list[Any]] | None = None,
    *,
    defers_events: Callable[[], bool] | None = None,
) -> None:
    """Take part in waiting for the device: `torch.tpu.synchronize` and events.

    Args:
        finish: Has `torch.tpu.synchronize` wait for work that a thread of the package sends:
            returns when all that was given to the thread has been sent, with the arrays that are
            computed last.
        defers_events: Asked at each event without timing that is recorded: True leaves what is
            recorded as it is until the event is asked for.

    Example:
        >>> on_synchronize(SENDER.finish)
        >>> on_synchronize(defers_events=lambda: inside_of_region)
    """
    if finish is not None:
        synchronization.QUEUES.append(finish)
    if defers_events is not None:
        synchronization.DEFERS.append(defers_events)


def make_backend(rank: int, size: int, timeout: float, implementation: Any) -> Any:
    """A c10d backend whose collectives a Python object carries out.

    Args:
        rank: Of this process in the group.
        size: Number of processes.
        timeout: Seconds that c10d allows a collective unless a call says otherwise.
        implementation: Has c10d's collectives as methods: ``allreduce(tensors, op, timeout,
            is_async)`` and so on, each of which returns a work.

    Example:
        >>> backend = make_backend(0, 2, 600.0, group)
    """
    return _C.make_backend(rank, size, "tpu", timeout, implementation)


def ring_all_reduce(
    source: int,
    out: int,
    elements: int,
    dtype: torch.dtype,
    op: str,
    factor: float,
    divisor: int,
    rank: int,
    size: int,
    next: int,
    previous: int,
    seconds: float,
) -> None:
    """Reduce memory of this process with that of others around a ring of sockets.

    Args:
        source, out: Addresses of ``elements`` numbers each; they may be equal.
        elements: Number of elements.
        dtype: Of a number.
        op: ``"sum"``, ``"min"``, ...
        factor: Number that this process' elements are multiplied by first.
        divisor: Number that the results are divided by.
        rank, size: Of this process in the ring, and of the ring.
        next, previous: File descriptors of connections to the neighbours.
        seconds: Longest wait for a neighbour.

    Raises:
        TimeoutError: A neighbour does not answer.
        OSError: A connection was lost.

    Example:
        >>> ends = to.fileno(), of.fileno()
        >>> ring_all_reduce(p, p, n, torch.float32, "sum", 1.0, 1, 0, 2, *ends, 60.0)
    """
    _C.ring_all_reduce(
        *(source, out, elements, dtype, op, factor, divisor, rank, size, next, previous, seconds)
    )


class Artifacts:
    """Output of a package for those who debug: logs, structured traces, files.

    Args:
        name: Of the logger, which ``TORCH_LOGS`` turns on.
        description: Text that ``TORCH_LOGS=help`` shows.

    Attributes:
        logger: The logger; it is at ``logging.DEBUG`` where ``TORCH_LOGS`` names it.

    Example:
        >>> artifacts = Artifacts("mylib_graphs", "Graphs of mylib.")
        >>> artifacts.write("graph_1.py", module.print_readable)
    """

    def __init__(self, name: str, description: str) -> None:
        from tpu_core.compiler import dumps

        self._dumps = dumps
        self.logger: logging.Logger = dumps.artifact_logger(name, description)

    def write(self, file: str, text: Callable[[], str]) -> None:
        """Write a file into the folder ``TPU_DUMP``, if that is set."""
        self._dumps.write(file, text)

    def trace(self, name: str, text: Callable[[], str]) -> None:
        """Record a text in PyTorch's structured trace, if ``TORCH_TRACE`` is set."""
        self._dumps.trace(name, text)
