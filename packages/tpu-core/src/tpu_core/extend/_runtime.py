"""The running device, and work that other threads send."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tpu_core import synchronization


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

    @staticmethod
    def count_split(op: str, why: str, line: str | None, *, warns: bool = True) -> None:
        """Count an op that a graph is compiled without, and warn at the first of an op.

        Args:
            op: Name of the overload.
            why: The reason, for `torch.tpu.compile_report`.
            line: The user's line, ``"model.py:31 in forward"``.
            warns: False where the user has asked for the split.

        Example:
            >>> artifacts.count_split("mylib.f.default", "it has no lowering", "model.py:31 in f")
        """
        from tpu_core.config import config
        from tpu_core.errors import GraphSplitWarning
        from tpu_core.logs import warn_at
        from tpu_core.metrics import METRICS, GraphSplit

        is_first = METRICS.graph_split(GraphSplit(op, why, line))
        if is_first and warns and config().performance_warnings:
            text = f"{op} runs outside of the programs of a compiled graph: {why}."
            warn_at(line, GraphSplitWarning(text, line=line))
