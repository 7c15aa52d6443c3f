"""The limit on a process's memory maps, of which each program of XLA:CPU has three or more.

Linux allows 65,530 unless it is told otherwise. XLA does not survive an allocation that is refused
for that: it ends the process.
"""

from __future__ import annotations

from pathlib import Path

from tpu_core.errors import CompilationError

# Programs between two counts, which take some milliseconds each.
_EVERY = 64
# Maps that are left for those programs, and for what else a process does.
_LEFT = 2_048

_LIMIT = Path("/proc/sys/vm/max_map_count")
_MAPS = Path("/proc/self/maps")


class MemoryMaps:
    """Counts memory maps now and then.

    Example:
        >>> maps = MemoryMaps()
        >>> maps.check("train.py:12")  # before each program that is made or loaded
    """

    def __init__(self) -> None:
        self._programs = 0

    def check(self, line: str | None = None) -> None:
        """Refuse a program for which there may be no memory maps.

        Args:
            line: The user's, for the error.

        Raises:
            CompilationError: The process has nearly as many maps as it may have.
        """
        self._programs += 1
        if self._programs % _EVERY:
            return
        try:
            maps, limit = _MAPS.read_bytes().count(b"\n"), int(_LIMIT.read_text())
        except OSError:  # no Linux, and no such limit that could be read
            return
        if maps <= limit - _LEFT:
            return
        self._programs -= 1  # the next program is refused as well
        raise CompilationError(
            "Too many programs: the process has nearly as many memory maps as it may have.",
            values={"memory maps": f"{maps:,}", "limit": f"{limit:,}"},
            line=line,
            remedy="Raise the limit (sysctl -w vm.max_map_count=1000000), or have fewer programs: "
            "torch.tpu.compile_report() says why there are many.",
        )
