"""Errors that programs found after the last read of the process: a warning at its exit."""

from __future__ import annotations

import atexit
import sys
import time

from tpu_core import _C
from tpu_core.errors import UnreadErrorWarning
from tpu_core.logs import warn_at

# For what still runs; a program that waits for a peer that is gone ends never.
_MOST_SECONDS = 5.0


def watch(devices: int) -> None:
    """Look at what the programs have found when the interpreter exits.

    Args:
        devices: Number of devices.
    """
    atexit.register(_look, devices)


def _look(devices: int) -> None:
    if _C.in_bad_fork() or isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        return
    deadline = time.monotonic() + _MOST_SECONDS
    for device in range(devices):
        if not _is_done(device, deadline):
            continue
        try:
            _C.raise_checks(device, _C.launches())
        except Exception as error:
            _warn(error)


def _is_done(device: int, deadline: float) -> bool:
    """Wait for the newest program of a device."""
    newest = _C.newest_array(device)
    while newest is not None and not newest.is_deleted() and not newest.is_ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def _warn(error: Exception) -> None:
    notes = getattr(error, "__notes__", [])
    line = next((n.rpartition(" at ")[2].rpartition(",")[0] for n in notes if " at " in n), None)
    warn_at(
        line,
        UnreadErrorWarning(
            f"A program found an error that no read has raised: {type(error).__name__}: {error}",
            values={"found": "; ".join(notes)} if notes else None,
            line=line,
        ),
    )
