"""Detection of lines that sync with the device in nearly every step.

A read harms where it leaves the device without work while the host records what comes next, and
where that happens all the time. So a read counts only if a program ran since the last one of its
line and nothing is left to run after it; and `READS` of them must follow each other without a
compile in between, more often than every third step of an optimizer or, where no optimizer steps
(evaluation, text generation), than every fifth program.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from tpu_core import _C, modes, synchronization
from tpu_core.errors import HostSyncWarning
from tpu_core.logs import warn_at
from tpu_core.metrics import METRICS

READS = 20
_STEPS_A_READ = 3
_PROGRAMS_A_READ = 5

# What the extension calls a read, as users write it; other names are those of ops.
AS_WRITTEN = {
    "item": "item(), float(), bool() or a use as a number",
    "copy to the host": "cpu(), tolist(), numpy() or print()",
    "boolean mask index": "an index that is a boolean mask",
}
_REMEDY = {
    "boolean mask index": "Keep the shape: torch.where(mask, x, 0) instead of x[mask]. ",
    "nonzero": "Keep the shape: torch.where(mask, x, 0) instead of indices of nonzero(). ",
    "copy to the host": "Keep detached tensors in a list and copy them every so many steps. ",
}


@dataclass(slots=True)
class _Window:
    """Reads of a line since the last compile, or since the last verdict.

    Attributes:
        programs, steps, made: Programs run, optimizer steps and programs compiled at its start.
        latest: Programs run at the latest read.
        reads: Number of reads.
    """

    programs: int
    steps: int
    made: int
    latest: int
    reads: int = 0


class HostSyncs:
    """Watches reads from the device. Thread-safe; it adds up to 4 µs to a read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}
        self._warned: set[str] = set()
        self._steps = 0
        self._hooked = False
        self._devices: list[Any] = []

    def watch(self, devices: list[Any]) -> None:
        """Take the devices whose work is waited for, once they are known."""
        self._devices = devices

    def read(self, line: str, reason: str, array: Any) -> None:
        """A value was read by the host, which waited for it.

        Args:
            line: The user's line.
            reason: The reading call, such as ``"item"``.
            array: The value on the device.
        """
        # Fallbacks have a warning of their own, and a mode that waits for each op means to.
        if line in self._warned or reason == "fallback" or modes.active().wait:
            return
        programs = _C.counters()["executions"]
        with self._lock:
            if not self._hooked:
                self._hook()
            seen = self._frequent(line, programs, array)
        if seen:
            what = AS_WRITTEN.get(reason, reason)
            general = HostSyncWarning.remedy
            warning = HostSyncWarning(
                "This line reads from the device in nearly every step, and each time the device "
                "runs out of work.",
                values={"read by": what, "reads": seen},
                line=line,
                remedy=_REMEDY[reason] + general[general.index("TPU_") :]
                if reason in _REMEDY
                else None,
            )
            warn_at(line, warning)

    def _frequent(self, line: str, programs: int, array: Any) -> str | None:
        """Frequency of a line's reads, in words, where a warning is due."""
        made = METRICS.program_count()
        window = self._windows.get(line)
        if window is None or window.made != made:
            self._windows[line] = _Window(programs, self._steps, made, programs)
            return None
        if window.latest == programs or not self._is_idle(array):
            return None
        window.latest = programs
        window.reads += 1
        if window.reads < READS:
            return None
        del self._windows[line]
        steps, ran = self._steps - window.steps, programs - window.programs
        if READS * (_STEPS_A_READ / steps if steps else _PROGRAMS_A_READ / ran) < 1:
            return None
        self._warned.add(line)
        if steps:
            return f"the last {READS} in {steps} optimizer steps"
        return f"the last {READS} in {ran} programs run"

    def _is_idle(self, array: Any) -> bool:
        """Return whether the device of ``array`` has nothing left to run."""
        devices = self._devices
        index = 0 if len(devices) == 1 else devices.index(next(iter(array.devices())))
        return synchronization.is_ready(_C.newest_array(index), index)

    def _hook(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._hooked = True
        register_optimizer_step_post_hook(self._count_step)

    def _count_step(self, *_: Any) -> None:
        self._steps += 1


SYNCS = HostSyncs()
