"""Stacks of allocations, as the extension records them for the history of memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpu_core import _C, internal_files


@dataclass(frozen=True, slots=True)
class Stack:
    """Stack of an allocation.

    Attributes:
        name: Use of memory that belongs to several lines, as a program's temporaries; else "".
        frames: In memory_viz' form, innermost first, without this project's own.
        line: The user's line, ``"train.py:31 in step"``, or None where there is none.
    """

    name: str
    frames: list[dict[str, Any]]
    line: str | None


NO_STACK = Stack("", [], None)
_stacks: list[Stack] = []
_lock = threading.Lock()


def stack(number: int) -> Stack:
    """The stack that the extension knows by a number; 0 is none."""
    if not number:
        return NO_STACK
    if number > len(_stacks):
        with _lock:
            own = internal_files.package_folders()
            _stacks.extend(_read(own, *s) for s in _C.memory_stacks(len(_stacks)))
    return _stacks[number - 1]


def _read(
    own: tuple[str, ...],
    name: str,
    frames: Sequence[tuple[str, int, str]],
    users: int | None,
    gradient: bool,
) -> Stack:
    shown: list[dict[str, Any]] = []
    line = None
    if name:
        shown.append({"filename": "<XLA program>", "line": 0, "name": name})
    for i, (file, number, function) in enumerate(frames):
        if i == users:
            line = f"{file}:{number} in {function}"
            if gradient:
                function += " (gradient)"
                line += ", gradient"
        elif file.startswith(own):
            continue
        shown.append({"filename": file, "line": number, "name": function})
    return Stack(name, shown, line)
