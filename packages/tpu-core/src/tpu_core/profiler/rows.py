"""Rows of a profile, as the extension hands them to Kineto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Kind(IntEnum):
    """Kinds of rows, by their index in ``kRowTypes`` of ``csrc/execution/profiler_session.cpp``:
    the numbers of Kineto's activity types differ between releases of torch.
    """

    PROGRAM = 0  # GPU_USER_ANNOTATION: shown, and not summed with the ops inside it
    TRANSFER = 1  # GPU_MEMCPY
    OP = 2  # CONCURRENT_KERNEL
    HOST = 3  # PRIVATEUSE1_RUNTIME


@dataclass(slots=True)
class Row:
    """A row of the profile.

    Attributes:
        kind: Kind of activity.
        name: Its name.
        start, end: Nanoseconds since the epoch.
        device: Index of the device, or the process for a row of the host's.
        resource: Track of the device, or thread.
        correlation: Id of the ``aten::`` row that it belongs to, or 0.
        flow: Arrows lead from the row that starts a flow to the other of the same number; 0: none.
        starts_flow: Whether this is the row where it starts.
        metadata: Shown with the row.
    """

    kind: Kind
    name: str
    start: int
    end: int
    device: int
    resource: int
    correlation: int = 0
    flow: int = 0
    starts_flow: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def is_marker(self) -> bool:
        """True if it is the start of an arrow in a row of PyTorch's."""
        return self.kind is Kind.HOST and self.correlation != 0

    def native(self) -> tuple[Any, ...]:
        """The tuple that the extension reads."""
        return (
            int(self.kind),
            _escaped(self.name),
            self.start,
            self.end,
            self.device,
            self.resource,
            self.correlation,
            self.flow,
            self.starts_flow,
            [(key, _escaped(str(value))) for key, value in self.metadata.items()],
        )


def _escaped(text: str) -> str:
    return json.dumps(text)[1:-1]  # Kineto writes texts into JSON as they are


class Tracks:
    """Numbers of a device's tracks, in the order in which they are shown."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}

    def number(self, device: int, name: str) -> int:
        """The number of a track."""
        return self._numbers.setdefault((device, name), len(self._numbers))

    def all(self) -> Iterator[tuple[int, int, str]]:
        """(device, number, name) of each."""
        for (device, name), number in self._numbers.items():
            yield device, number, name


def short_name(op: str) -> str:
    """``aten::add`` of ``aten.add.Tensor`` or ``aten::add.Tensor``."""
    namespace, _, rest = op.replace("::", ".", 1).partition(".")
    return f"{namespace}::{rest.split('.')[0]}"


def short_line(line: str) -> str:
    """``train.py:31`` of ``project/train.py:31 in step``."""
    return line.split(" in ")[0].rsplit("/", 1)[-1]


def op_name(op: str, line: str) -> str:
    """Name of a row: the op and the user's line."""
    return f"{op} ({short_line(line)})" if line else op
