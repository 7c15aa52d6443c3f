"""The running device, worlds of processes, and work that other threads send."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from tpu_core import _C, synchronization
from tpu_core.runtime import join_world as _join_world


def on_synchronize(finish: Callable[[], list[Any]]) -> None:
    """Have `torch.tpu.synchronize` wait for work that a thread of the package sends.

    Args:
        finish: Returns when all that was given to the thread has been sent, with the arrays that
            are computed last.

    Example:
        >>> on_synchronize(SENDER.finish)
    """
    synchronization.QUEUES.append(finish)


def defer_events(is_deferring: Callable[[], bool]) -> None:
    """Have an event without timing leave what is recorded as it is until the event is asked for.

    Args:
        is_deferring: Asked at each event that is recorded.

    Example:
        >>> defer_events(lambda: inside_of_region)
    """
    synchronization.DEFERS.append(is_deferring)


def join_world(
    world: Any, address: tuple[str, int], secret: bytes, interface: str, timeout: float
) -> None:
    """Make the device one of a `World` of processes; values on it move to the new client.

    Args:
        world: The world.
        address: Host and port of its coordinator.
        secret: Of the job.
        interface: Address at which the CPU platform's collectives listen; "" for jaxlib's choice.
        timeout: Seconds to wait for the other processes.

    Raises:
        ProcessGroupError: The device was used before and cannot be started again, the coordinator
            does not take this process, or others do not come.
        OSError: The coordinator cannot be reached.

    Example:
        >>> port = World.start_coordinator("job", 2, "127.0.0.1", secret)
        >>> join_world(World("job", 0, 2), ("127.0.0.1", port), secret, "127.0.0.1", 60.0)
    """
    from tpu_core.pjrt import distributed

    _join_world(lambda: distributed.join(world, address, secret, interface, timeout))


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


def note_kernel(op: str, implementation: str, why: str = "", line: str | None = None) -> None:
    """Count the choice of an implementation, for `torch.tpu.compile_report`.

    Args:
        op: Name of the kernel, as `tpu_kernels.using` takes it.
        implementation: The one that was chosen.
        why: Reason why it is none of those that are tried before it.
        line: The user's line.

    Example:
        >>> note_kernel("cross_entropy", "with logits", "the weights are divided", "train.py:12")
    """
    from tpu_core.metrics import METRICS, KernelChoice

    METRICS.kernel(KernelChoice(op, implementation, why, line))


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
