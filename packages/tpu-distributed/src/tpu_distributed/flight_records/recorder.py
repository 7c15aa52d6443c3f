"""Keep the last collectives of this process, and write them to a file when one fails.

A record is made when a collective is called, before the other ranks are waited for: the one that a
process hangs in is among them. Results are referred to weakly: a record keeps no memory.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_core.config import config
from tpu_core.extend import user_line

if TYPE_CHECKING:
    from tpu_distributed.rendezvous import CollectiveCall

VERSION = 1
# Folders of runs that are kept; those of older runs are removed by the next dump.
_RUNS_KEPT = 20
# Records whose results are looked at when the next is made. The rest waits for a dump.
_SETTLED_AT_ONCE = 8


@dataclass(slots=True, eq=False)
class Record:
    """A collective or message of this process.

    Attributes:
        group: Name of the group.
        ranks: Ranks of the group, as the default group numbers them.
        sequence: Number of the collective in its group, from 1; None of a message.
        call: Name and operands of the call.
        line: The user's line, ``"train.py:31"``.
        state: ``"called"``: waits for other ranks. ``"issued"``: they agree, and the device has the
            program. ``"done"``: the device has computed it, or a later one. ``"failed"``.
        called: Time of the call, in seconds since 1970.
        issued: Time of its issue, or None.
        done: Time at which it was first seen to be done, or None.
        error: First line of what was raised.
    """

    group: str
    ranks: tuple[int, ...]
    sequence: int | None
    call: CollectiveCall
    line: str | None
    state: str = "called"
    called: float = field(default_factory=time.time)
    issued: float | None = None
    done: float | None = None
    error: str | None = None
    _results: tuple[weakref.ref[Any], ...] = ()

    def finish(self) -> None:
        """Nothing of it is left to do."""
        if self.state not in ("done", "failed"):
            self.state, self.done = "done", time.time()

    def fail(self, error: object) -> None:
        """It raises an error."""
        self.state, self.error = "failed", str(error).partition("\n")[0]

    def issue(self, arrays: Sequence[Any] = ()) -> None:
        """The device has its program, and computes these arrays."""
        self.state, self.issued = "issued", time.time()
        self._results = tuple(weakref.ref(array) for array in arrays)

    def is_ready(self) -> bool | None:
        """Return whether the device has computed it; None where no result is left to ask."""
        arrays = [array for ref in self._results if (array := ref()) is not None]
        if not arrays:
            return None
        try:
            return all(array.is_deleted() or array.is_ready() for array in arrays)
        except Exception:  # it failed on the device, which is an end, too
            return True

    def to_dict(self) -> dict[str, Any]:
        """As in a dump."""
        return {
            "group": self.group,
            "ranks": list(self.ranks),
            "sequence": self.sequence,
            "call": str(self.call),
            "kind": self.call.kind,
            "shapes": [list(shape) for shape, _ in self.call.values],
            "dtypes": [str(dtype).removeprefix("torch.") for _, dtype in self.call.values],
            "line": self.line,
            "state": self.state,
            "called": self.called,
            "issued": self.issued,
            "done": self.done,
            "error": self.error,
        }


class FlightRecorder:
    """The last collectives of this process, oldest first; ``TPU_FLIGHT_RECORDS`` says how many.

    Example:
        >>> print(tpu_distributed.flight_recorder())
        0 #1 all_reduce sum float32[4] done at train.py:31
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._run = f"process-{os.getpid()}"
        self._records: deque[Record] = deque(maxlen=1)
        self._issued: deque[Record] = deque(maxlen=1)
        self._made = 0
        self._lock = threading.Lock()

    def start(self, run: str | None, rank: int, size: int) -> None:
        """Begin anew, for a new default group.

        Args:
            run: A name that all its processes have in common.
            rank: Of this process.
            size: Number of processes.
        """
        with self._lock:
            self._run = run or f"process-{os.getpid()}"
            self.rank, self.size, self._made = rank, size, 0
            self._records = deque(maxlen=config().flight_records)
            self._issued = deque(maxlen=config().flight_records)

    def called(
        self, group: str, ranks: tuple[int, ...], sequence: int | None, call: CollectiveCall
    ) -> Record:
        """A new record; its line is that of the user's frame."""
        record = Record(group, ranks, sequence, call, user_line())
        with self._lock:
            self._records.append(record)
            self._made += 1
        return record

    def forget(self, record: Record) -> None:
        """Drop a record: its collective is going to be called again."""
        with self._lock:
            if record in self._records:
                self._records.remove(record)
                self._made -= 1

    def issued(self, record: Record, arrays: Sequence[Any]) -> None:
        """A collective's program was sent to the device, which computes these arrays."""
        record.issue(arrays)
        with self._lock:
            self._settle(_SETTLED_AT_ONCE)
            self._issued.append(record)

    def records(self) -> list[dict[str, Any]]:
        """The records, oldest first, with the names of `Record`'s attributes and more.

        Returns:
            Dicts as in a dump; ``kind``, ``shapes`` and ``dtypes`` are those of the operands.
        """
        with self._lock:
            self._settle(len(self._issued))
            return [record.to_dict() for record in self._records]

    def dump(self, folder: str | os.PathLike[str] | None = None, reason: str = "asked for") -> Path:
        """Write the records to a file, for ``tpu flights``.

        Args:
            folder: Target folder, the same on all ranks unless their files are brought together
                later; a folder of this run in ``TPU_FLIGHT_DIR`` unless given.
            reason: Reason, in a few words.

        Returns:
            The file, ``rank-<rank>.json``, which replaces that of an earlier dump.
        """
        records = self.records()
        content = {
            "version": VERSION,
            "rank": self.rank,
            "size": self.size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "reason": reason,
            "time": time.time(),
            "dropped": self._made - len(records),
            "records": records,
        }
        if folder is None:
            _remove_old_runs(config().flight_dir, self._run)
        place = config().flight_dir / self._run if folder is None else Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        file = place / f"rank-{self.rank}.json"
        written = file.with_suffix(f".{os.getpid()}.tmp")
        written.write_text(json.dumps(content))
        written.replace(file)
        return file

    def __str__(self) -> str:
        return "\n".join(
            " ".join(
                part
                for part in (
                    record["group"],
                    f"#{record['sequence']}" if record["sequence"] is not None else "",
                    record["call"],
                    record["state"],
                    f"at {record['line']}" if record["line"] else "",
                )
                if part
            )
            for record in self.records()
        )

    def _settle(self, most: int) -> None:
        """Mark as done what was computed: the device works in order."""
        done = 0
        for number, record in enumerate(itertools.islice(self._issued, most), 1):
            ready = record.is_ready()
            if ready is False:
                break
            if ready:
                done = number
        for _ in range(done):
            self._issued.popleft().finish()


def _remove_old_runs(folder: Path, but: str) -> None:
    """Remove the dumps of all but the last runs, and nothing else."""
    try:
        runs = [f for f in folder.iterdir() if re.fullmatch(r"[0-9a-f]{32}|process-\d+", f.name)]
        runs = sorted((f for f in runs if f.name != but), key=lambda f: f.stat().st_mtime)
        for run in runs[: -(_RUNS_KEPT - 1)]:
            for file in run.glob("rank-*.json"):
                file.unlink(missing_ok=True)
            run.rmdir()
    except OSError:  # another process removes them, or the folder is new
        return


RECORDER = FlightRecorder()
