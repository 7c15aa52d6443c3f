"""What c10d's ``Work`` objects ask: whether a collective is done, and to wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from tpu_core.xla_status import map_xla_error
from tpu_distributed.control import Control
from tpu_distributed.flights.recorder import Record


class Issued:
    """A collective that was sent to the device, which runs in order: nothing is left to wait for.

    Args:
        tensors: Its results.
        arrays: What the device computes for it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], arrays: Sequence[Any] = ()) -> None:
        self._tensors = list(tensors)
        self.arrays = list(arrays)

    def wait(self, timeout: float | None) -> None:
        """Let what is recorded from now on see the results. The host does not wait."""

    def is_completed(self) -> bool:
        """Whether the device is done with it."""
        try:
            return all(a.is_deleted() or a.is_ready() for a in self.arrays)
        except Exception:  # it failed, and `exception` says how
            return True

    def exception(self) -> BaseException | None:
        """Why it failed, once it is completed."""
        if not self.is_completed():
            return None
        for array in self.arrays:
            if array.is_deleted():
                continue
            try:
                array.block_until_ready()
            except Exception as error:
                return map_xla_error(error, stage="run")
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that it wrote."""
        return self._tensors

    def source_rank(self) -> int:
        """Only what was received has a source."""
        return -1


class Sent(Issued):
    """A message on its way.

    Args:
        work: Of gloo.
        host: The memory that it is sent from, kept until it was sent.
        tensor: What was sent.
        control: Names errors.
        record: Of the message.
    """

    def __init__(
        self, work: Any, host: torch.Tensor, tensor: torch.Tensor, control: Control, record: Record
    ) -> None:
        super().__init__([tensor])
        self._work, self._host, self._control, self._record = work, host, control, record
        self._error: BaseException | None = None
        self._done = False

    def wait(self, timeout: float | None) -> None:
        """Wait until the message was passed on."""
        if self._error is not None:
            raise self._error
        if self._done:
            return
        limit = timeout or self._control.timeout
        try:
            with self._control.errors(self._record, limit):
                self._work.wait(timedelta(seconds=limit))
        except Exception as error:
            self._error = error
            raise
        self._done = True
        self._record.finish()
        self._finish()

    def is_completed(self) -> bool:
        """Whether the message was passed on, or never will be."""
        return self._done or self._error is not None or bool(self._work.is_completed())

    def exception(self) -> BaseException | None:
        """Why it was not."""
        return self._error

    def _finish(self) -> None:
        pass


class Received(Sent):
    """A message that is waited for; its tensor has the value once `wait` has returned."""

    def _finish(self) -> None:
        self._tensors[0].detach().copy_(self._host)

    def source_rank(self) -> int:
        """The rank that it came from."""
        return int(self._work._source_rank())


class Several(Issued):
    """Works that were issued between ``start_coalescing`` and ``end_coalescing``."""

    def __init__(self, works: Sequence[Issued]) -> None:
        super().__init__([t for work in works for t in work.result()])
        self._works = works

    def wait(self, timeout: float | None) -> None:
        """Wait for each."""
        for work in self._works:
            work.wait(timeout)

    def is_completed(self) -> bool:
        """Whether all are."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """The first error."""
        return next((e for e in (work.exception() for work in self._works) if e), None)
