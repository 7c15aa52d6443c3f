"""The running device, worlds of processes, and work that other threads send."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tpu_core import synchronization
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
