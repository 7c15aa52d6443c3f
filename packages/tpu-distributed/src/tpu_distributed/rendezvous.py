"""Preflight check of collectives: ranks compare calls, so that none hangs.

A collective that some rank does not enter cannot be called off once it runs, and one that two ranks
call with different sizes ends their processes. So the ranks first exchange a few bytes over a
connection that has time-outs and notices when a process is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tpu_core.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    ProcessGroupError,
    TpuError,
)
from tpu_distributed import addresses, mismatch_report, split_sizes
from tpu_distributed.connections import Connections, Heard, Reduced
from tpu_distributed.flight_records.recorder import RECORDER, Record
from tpu_distributed.split_sizes import Sizes

# How much of an array a message of the control connection takes along: what costs next to nothing.
_PAYLOAD_BYTES = 1024
# No more than this from all ranks together: what a socket takes before anybody reads it.
_GATHERED_BYTES = 1 << 16
# How long the others may take to say where they are, once a collective has failed.
_EXPLAIN_SECONDS = 2.0


@dataclass(frozen=True)
class CollectiveCall:
    """A collective as all ranks of a group must call it.

    Attributes:
        kind: ``"all_reduce"``, ...
        detail: Reduce op or root: ``"sum"``, ``"from 0"``.
        values: Shape and dtype of what a rank contributes, one by one.
    """

    kind: str
    detail: str = ""
    values: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(f"{str(d).removeprefix('torch.')}{list(s)}" for s, d in self.values)
        return " ".join(part for part in (self.kind, self.detail, shown) if part)

    def __hash__(self) -> int:
        return self.fingerprint

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that are the same in every process."""
        return fingerprint_of(str(self))

    @cached_property
    def is_empty(self) -> bool:
        """True if there is not an element in it."""
        return all(0 in shape for shape, _ in self.values)


class Agreement(Enum):
    """In what the programs of ranks are the same."""

    ALL = auto()
    BUT_CONSTANTS = auto()
    NOTHING = auto()


def fingerprint_of(text: str) -> int:
    """63 bits that are the same in every process."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Rendezvous:
    """The control connection of a group.

    Args:
        store: Keys of this group alone.
        name: Of the group.
        rank: Of this process in it.
        size: Number of processes.
        timeout: Seconds that a collective waits for the others.
        ranks: Of the group's processes in the default group.
    """

    def __init__(
        self, store: Any, name: str, rank: int, size: int, timeout: float, ranks: Sequence[int]
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.ranks = tuple(ranks)
        # Of whose programs: a later group may have this name, and other ranks.
        self.label = f"{name} of {', '.join(map(str, ranks))}"
        self.timeout = timeout
        self.sequence = 0
        self.order = threading.Lock()
        self._store = store
        self._failure: TpuError | None = None
        connection = dist.PrefixStore("control/", store)
        self.gloo: Any = dist.ProcessGroupGloo(
            connection, rank, size, addresses.gloo_options(size, timeout)
        )
        self._connections = self._connected(store, "agreement")
        self._ring: Connections | None = None

    def called(self, call: CollectiveCall) -> Record:
        """The record of the next collective. `order` must be held until that is in the queue."""
        self.sequence += 1
        return RECORDER.called(self.name, self.ranks, self.sequence, call)

    @property
    def payload_bytes(self) -> int:
        """Bytes that `agree` carries from each rank."""
        return min(_PAYLOAD_BYTES, _GATHERED_BYTES // self.size)

    def take_back(self, record: Record) -> None:
        """Forget the last collective that was `called`."""
        assert record.sequence == self.sequence
        self.sequence -= 1
        RECORDER.forget(record)

    def agree(
        self,
        record: Record,
        timeout: float | None = None,
        payload: np.ndarray[Any, Any] | None = None,
    ) -> Sequence[np.ndarray[Any, Any]]:
        """Wait until all ranks have come to the same collective. For the sending thread alone.

        Args:
            record: Of what this rank wants.
            timeout: Seconds to wait; those of the group unless given.
            payload: Bytes for the others: at most `payload_bytes`.

        Returns:
            The payload of each rank, not to be written to; nothing where there is none.

        Raises:
            CollectiveMismatchError: Ranks want different things.
            CollectiveTimeoutError: Some did not come.
            PeerLostError: Some are gone.
            ProcessGroupError: The group failed before.
        """
        if self.size == 1:
            return ()
        given = b"" if payload is None else payload.tobytes()
        while True:
            heard, payloads = self._exchange(record, (0, 0), given, timeout)
            if all(heard.same):
                break
            if not heard.any[2]:
                raise self._mismatch(record)
            # Some ranks came with a whole program. They come again, with this collective alone.
            self._differ(record, [f"out of spmd(): {record.call} at {record.line}"])
        if payload is None:
            return ()
        return [np.frombuffer(p, payload.dtype).reshape(payload.shape) for p in payloads]

    def all_reduce(self, record: Record, what: Reduced) -> None:
        """Reduce an array over the ranks, two or more, which have agreed to.

        For the sending thread alone.

        Args:
            record: Of the call.
            what: The array.

        Raises:
            TpuError: As of `agree`.
        """
        with self.errors(record):
            if self._ring is None:
                self._ring = self._connected(self._store, "ring")
            assert self._ring is not None  # there are other ranks
            self._ring.all_reduce(what, self.timeout)

    def agree_on_program(
        self, record: Record, fingerprints: tuple[int, int], ops: Sequence[str]
    ) -> Agreement:
        """Wait until all ranks have come to a collective that is part of a program.

        Args:
            record: Of the program's first collective.
            fingerprints: Of the program and of the constants in it, 63 bits each; the first not 0.
            ops: Text about it where ranks differ, op by op.

        Returns:
            In what the programs are the same. Where that is nothing, a warning has said so, and
            each rank must go on with that collective alone.

        Raises:
            TpuError: As of `agree`, but for mismatches.
        """
        heard, _ = self._exchange(record, fingerprints, b"", None)
        if all(heard.same):
            return Agreement.ALL
        if all(heard.same[:3]):
            return Agreement.BUT_CONSTANTS
        self._differ(record, ops)
        return Agreement.NOTHING

    def _exchange(
        self, record: Record, program: tuple[int, int], payload: bytes, timeout: float | None
    ) -> tuple[Heard, list[bytes]]:
        assert self._connections is not None  # there are other ranks
        seconds = timeout or self.timeout
        with self.errors(record, seconds):
            return self._connections.exchange(
                (record.sequence or 0, record.call.fingerprint, *program), payload, seconds
            )

    def _differ(self, record: Record, ops: Sequence[str]) -> None:
        key = f"program/{record.sequence}"
        listed = mismatch_report.exchange(self._store, key, self.rank, self.size, ops)
        mismatch_report.warn(self.name, listed, record.line)

    def splits_differ(self, record: Record, sizes: Sizes) -> CollectiveMismatchError:
        """The error of an all_to_all whose ranks do not expect what others send; on all ranks.

        Args:
            record: Of the call, to which all have agreed.
            sizes: Of this rank.
        """
        what = f"Ranks of group '{self.name}' send other sizes than their peers expect."
        dumped = _dumped(record, what)
        key = f"sizes/{record.sequence}"
        told = split_sizes.exchange(self._store, key, self.rank, self.size, sizes)
        found: dict[str, object] = {"call": record.call, **split_sizes.differences(told), **dumped}
        remedy = "Let each rank expect as many elements of another one as that one sends to it."
        return CollectiveMismatchError(what, values=found, line=record.line, remedy=remedy)

    def message(self, call: CollectiveCall) -> Record:
        """The record of a message, which other ranks need not agree to."""
        return RECORDER.called(self.name, self.ranks, None, call)

    @contextlib.contextmanager
    def errors(self, record: Record, timeout: float | None = None) -> Iterator[None]:
        """Translate errors of gloo and sockets in this block to errors of this project.

        Args:
            record: Of what is being done.
            timeout: Seconds that it may take; those of the group unless given.
        """
        if self._failure is not None:
            error = ProcessGroupError(
                f"An earlier collective of group '{self.name}' failed.",
                values={"call": record.call, "failed": str(self._failure).splitlines()[0]},
                line=record.line,
            )
            record.fail(error)
            raise error from self._failure
        try:
            yield
        except TpuError:
            raise
        except (RuntimeError, OSError) as raised:
            self.close()  # those that wait for this rank hear of it at once
            self._failure = self._explain(raised, record, timeout or self.timeout)
            raise self._failure from raised

    def set_timeout(self, seconds: float) -> None:
        """Change how long collectives wait."""
        self.timeout = seconds

    def close(self) -> None:
        """Drop the connection; ranks that still wait for this one get a `PeerLostError`."""
        for connections in (self._connections, self._ring):
            if connections is not None:
                connections.close()
        self.gloo.shutdown()

    def _connected(self, store: Any, purpose: str) -> Connections | None:
        if self.size == 1:
            return None
        own = dist.PrefixStore(f"{purpose}/", store)
        try:
            return Connections(own, self.rank, self.size, self.timeout, purpose == "ring")
        except (RuntimeError, OSError) as error:
            raise ProcessGroupError(
                f"The ranks of group '{self.name}' could not be connected.",
                values={"rank": self.rank, "timeout": f"{self.timeout:g} s", "cause": error},
            ) from error

    def _explain(self, error: Exception, record: Record, timeout: float) -> TpuError:
        made: type[TpuError] = PeerLostError
        what = f"A process of group '{self.name}' was lost."
        if "imed out" in str(error) or "imeout" in str(error):
            made = CollectiveTimeoutError
            what = f"A collective did not start within {timeout:g} s."
        values: dict[str, object] = {"group": self.name, "call": record.call}
        values.update(_dumped(record, what))
        absent = self._absent(record)
        if absent:
            values["missing"] = ", ".join(f"rank {r}" for r in absent)
        values["cause"] = str(error).splitlines()[0]
        return made(what, values=values, line=record.line)

    def _absent(self, record: Record) -> list[int]:
        """Ranks that do not say within a moment that this collective failed for them, too."""
        key = f"failed/{record.sequence or self.sequence}"
        try:
            self._store.set(f"{key}/{self.rank}", b"1")
            with contextlib.suppress(RuntimeError):  # those that do not come are the answer
                self._store.wait(
                    [f"{key}/{r}" for r in range(self.size)], timedelta(seconds=_EXPLAIN_SECONDS)
                )
            return [r for r in range(self.size) if not self._store.check([f"{key}/{r}"])]
        except RuntimeError:  # the store went with the process that is gone
            return []

    def _mismatch(self, record: Record) -> TpuError:
        key, call, line = f"call/{record.sequence}", record.call, record.line
        what = f"Ranks of group '{self.name}' called different collectives."
        dumped = _dumped(record, what)
        self._store.set(f"{key}/{self.rank}", f"{call} at {line}" if line else str(call))
        calls: dict[str, object] = {}
        for r in range(self.size):
            with contextlib.suppress(RuntimeError):  # one that is gone is left out
                self._store.wait([f"{key}/{r}"], timedelta(seconds=_EXPLAIN_SECONDS))
                calls[f"rank {r}"] = self._store.get(f"{key}/{r}").decode()
        return CollectiveMismatchError(what, values={**calls, **dumped}, line=line)


def _dumped(record: Record, what: str) -> dict[str, object]:
    """Note that a collective failed, and write the flight records of this rank.

    Returns:
        What to say about it in the error.
    """
    record.fail(what)
    try:
        return {"flight record": RECORDER.dump(reason=what)}
    except OSError as error:  # a disk that is full must not hide what happened
        return {"flight record": f"not written: {error}"}
