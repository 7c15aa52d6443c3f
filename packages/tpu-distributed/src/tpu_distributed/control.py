"""What processes agree on before each collective, so that none hangs or takes others with it.

A collective that some rank does not enter cannot be called off once it runs, and one that two ranks
call with different sizes ends their processes. So the ranks first exchange a few bytes over a
connection that has time-outs and notices when a process is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from tpu_core import _C
from tpu_core.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    ProcessGroupError,
    TpuError,
)

# How long the others may take to say where they are, once a collective has failed.
_EXPLAIN_SECONDS = 2.0


@dataclass(frozen=True)
class Call:
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

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that are the same in every process."""
        digest = hashlib.sha256(str(self).encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


class Control:
    """The control connection of a group.

    Args:
        store: Keys of this group alone.
        name: Of the group.
        rank: Of this process in it.
        size: Number of processes.
        timeout: Seconds that a collective waits for the others.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, timeout: float) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.timeout = timeout
        self.sequence = 0
        self._store = store
        self._failure: TpuError | None = None
        connection = dist.PrefixStore("control/", store)
        self.gloo: Any = dist.ProcessGroupGloo(
            connection, rank, size, timeout=timedelta(seconds=timeout)
        )
        self._own = torch.zeros(2, dtype=torch.int64)
        self._all = torch.zeros(2 * size, dtype=torch.int64)

    def agree(self, call: Call, timeout: float | None = None) -> None:
        """Wait until all ranks have come to the same collective.

        Args:
            call: What this rank wants.
            timeout: Seconds to wait; those of the group unless given.

        Raises:
            CollectiveMismatchError: Ranks want different things.
            CollectiveTimeoutError: Some did not come.
            PeerLostError: Some are gone.
            ProcessGroupError: The group failed before.
        """
        self.sequence += 1
        if self.size == 1:
            return
        self._own[0], self._own[1] = self.sequence, call.fingerprint
        self.exchange(self._own, self._all, call, timeout)
        if not torch.equal(self._all.view(-1, 2), self._own.expand(self.size, 2)):
            raise self._mismatch(call)

    def exchange(
        self, own: torch.Tensor, all: torch.Tensor, call: Call, timeout: float | None = None
    ) -> None:
        """Gather a small CPU tensor of each rank into ``all``; errors as of `agree`."""
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout or self.timeout)
        with self.errors(str(call), options.timeout.total_seconds()):
            self.gloo._allgather_base(all, own, options).wait()

    @contextlib.contextmanager
    def errors(self, call: str, timeout: float | None = None) -> Iterator[None]:
        """What gloo raises in this block, as errors of this project.

        Args:
            call: What is being done.
            timeout: Seconds that it may take; those of the group unless given.
        """
        if self._failure is not None:
            raise ProcessGroupError(
                f"An earlier collective of group '{self.name}' failed.",
                values={"call": call, "failed": str(self._failure).splitlines()[0]},
                line=_C.user_line(),
            ) from self._failure
        try:
            yield
        except TpuError:
            raise
        except RuntimeError as error:
            self._failure = self._explain(error, call, timeout or self.timeout)
            raise self._failure from error

    def set_timeout(self, seconds: float) -> None:
        """Change how long collectives wait."""
        self.timeout = seconds

    def close(self) -> None:
        """Drop the connection; who still waits for this rank gets a `PeerLostError`."""
        self.gloo.shutdown()

    def _explain(self, error: Exception, call: str, timeout: float) -> TpuError:
        absent = self._absent()
        values: dict[str, object] = {"group": self.name, "call": call}
        if absent:
            values["missing"] = ", ".join(f"rank {r}" for r in absent)
        values["cause"] = str(error).splitlines()[0]
        if "imed out" in str(error) or "imeout" in str(error):
            what = f"A collective did not start within {timeout:g} s."
            return CollectiveTimeoutError(what, values=values, line=_C.user_line())
        what = f"A process of group '{self.name}' was lost."
        return PeerLostError(what, values=values, line=_C.user_line())

    def _absent(self) -> list[int]:
        """Ranks that do not say within a moment that this collective failed for them, too."""
        key = f"failed/{self.sequence}"
        try:
            self._store.set(f"{key}/{self.rank}", b"1")
            with contextlib.suppress(RuntimeError):  # those that do not come are the answer
                self._store.wait(
                    [f"{key}/{r}" for r in range(self.size)], timedelta(seconds=_EXPLAIN_SECONDS)
                )
            return [r for r in range(self.size) if not self._store.check([f"{key}/{r}"])]
        except RuntimeError:  # the store went with the process that is gone
            return []

    def _mismatch(self, call: Call) -> TpuError:
        key = f"call/{self.sequence}"
        line = _C.user_line()
        self._store.set(f"{key}/{self.rank}", f"{call} at {line}" if line else str(call))
        calls = {}
        for r in range(self.size):
            with contextlib.suppress(RuntimeError):  # one that is gone is left out
                self._store.wait([f"{key}/{r}"], timedelta(seconds=_EXPLAIN_SECONDS))
                calls[f"rank {r}"] = self._store.get(f"{key}/{r}").decode()
        what = f"Ranks of group '{self.name}' called different collectives."
        return CollectiveMismatchError(what, values=calls, line=line)
