"""The state behind c10d's ``Work`` objects: completion and waiting."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from tpu_core.errors import map_xla_error
from tpu_core.extend import profile_work
from tpu_distributed.dispatcher import SENDER
from tpu_distributed.executors import CollectiveExecutor
from tpu_distributed.flight_records.recorder import RECORDER, Record
from tpu_distributed.rendezvous import Rendezvous


class CompletedWork:
    """A completed Work.

    Args:
        tensors: Its results.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)

    def wait(self, timeout: float | None) -> None:
        """Let what is recorded from now on see the results."""

    def prepare_future(self) -> None:
        """Do what is needed for the tensors to be used by ops that are recorded from now on."""

    def is_completed(self) -> bool:
        """Return whether the device is done with it."""
        return True

    def exception(self) -> BaseException | None:
        """The error, once it is completed."""
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that it wrote."""
        return self._tensors

    def source_rank(self) -> int:
        """Only what was received has a source."""
        return -1


class Read(Protocol):
    """An operand of a collective: that of `tpu_core.extend.DeviceValue`, say."""

    def array(self) -> Any:
        """Its array, once it is computed."""

    def is_last_use(self) -> bool:
        """Return whether nothing else will read it."""

    def release(self) -> None:
        """Let go of it."""


class Written(Protocol):
    """A result of a collective: a promise of `tpu_core.extend.DeviceValue`."""

    def keep(self, array: Any) -> None:
        """Fill in its array."""

    def fail(self, error: BaseException) -> None:
        """Have whatever reads it raise an error."""

    def end(self, take_back: bool) -> None:
        """Let go of it; the tensor gets back the value from before, if that is asked for."""


class Collective(CompletedWork):
    """A collective that is sent to the device when its turn has come.

    Args:
        tensors: Its results, for the user.
        record: Of the call.
        control: Agrees with the other ranks.
        executor: Carries it out.
        operands: Tensors that it reads.
        promises: Tensors that it writes, one for each of the first results of the program.
        agrees: Whether the ranks are still to agree.
        timeout: Seconds to wait for them; the group's unless given.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        record: Record,
        control: Rendezvous,
        executor: CollectiveExecutor,
        operands: Sequence[Read],
        promises: Sequence[Written],
        agrees: bool,
        timeout: float | None,
    ) -> None:
        super().__init__(tensors)
        self.is_sent = False
        self._record, self._control, self._executor = record, control, executor
        self._operands, self._promises = operands, promises
        self._agrees, self._timeout = agrees, timeout
        self._arrays: list[Any] = []
        self._error: BaseException | None = None
        self._is_entered = False  # the device may have taken operands that were given up

    def send(self) -> list[Any]:
        """Agree with the other ranks, and give the program to the device. Raises nothing."""
        try:
            arrays = [operand.array() for operand in self._operands]
            payloads: Sequence[Any] = ()
            call = self._record.call
            with profile_work(
                call.kind, self._record.line, "Collectives", lambda: self._arrays, call=call
            ):
                if self._agrees:
                    payload = self._executor.payload(arrays)
                    payloads = self._control.agree(self._record, self._timeout, payload)
                self._is_entered = True
                takes = all(operand.is_last_use() for operand in self._operands)
                try:
                    self._arrays = self._executor.run(arrays, takes, payloads, self._record)
                except Exception as error:
                    self._record.fail(error)
                    raise
            del arrays
            RECORDER.issued(self._record, self._arrays)
            for promise, array in zip(self._promises, self._arrays):
                promise.keep(array)
            self._promises = ()
        except BaseException as error:
            self._error = error
            for promise in self._promises:
                promise.fail(error)
        for operand in self._operands:
            operand.release()
        self._operands = ()
        self.is_sent = True
        return self._arrays

    @property
    def arrays(self) -> list[Any]:
        """Arrays that the device computes, once it is sent."""
        return self._arrays

    def wait(self, timeout: float | None) -> None:
        """Wait until the ranks have agreed and the device has its program, not for the results.

        Raises:
            TpuError: It could not be sent. Where that was found before anything was, the
                tensors have the values that they had before.
        """
        SENDER.wait(self)
        if self._error is not None:
            for promise in self._promises:
                promise.end(not self._is_entered)
            self._promises = ()
            raise self._error

    def is_completed(self) -> bool:
        """Return whether the device is done with it."""
        if not self.is_sent:
            return False
        try:
            return all(a.is_deleted() or a.is_ready() for a in self._arrays)
        except Exception:  # it failed, and `exception` says how
            return True

    def exception(self) -> BaseException | None:
        """The error, once it is completed."""
        if not self.is_completed():
            return None
        if self._error is not None:
            return self._error
        for array in self._arrays:
            if array.is_deleted():
                continue
            try:
                array.block_until_ready()
            except Exception as error:
                return map_xla_error(error, stage="run")
        return None


class Sent(CompletedWork):
    """A message on its way.

    Args:
        work: Of gloo.
        host: The memory that it is sent from, kept until it was sent.
        tensor: The tensor that was sent.
        control: Names errors.
        record: Of the message.
    """

    def __init__(
        self,
        work: Any,
        host: torch.Tensor,
        tensor: torch.Tensor,
        control: Rendezvous,
        record: Record,
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

    def prepare_future(self) -> None:
        """Wait for the message."""
        self.wait(None)

    def is_completed(self) -> bool:
        """Return whether the message was passed on, or never will be."""
        return self._done or self._error is not None or bool(self._work.is_completed())

    def exception(self) -> BaseException | None:
        """The error, or None."""
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


class CoalescedWork(CompletedWork):
    """Coalesced works, issued between ``start_coalescing`` and ``end_coalescing``."""

    def __init__(self, works: Sequence[CompletedWork]) -> None:
        super().__init__([t for work in works for t in work.result()])
        self._works = works

    def wait(self, timeout: float | None) -> None:
        """Wait for each."""
        for work in self._works:
            work.wait(timeout)

    def prepare_future(self) -> None:
        """As of each."""
        for work in self._works:
            work.prepare_future()

    def is_completed(self) -> bool:
        """Return whether all are."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """The first error."""
        return next((e for e in (work.exception() for work in self._works) if e), None)
