"""The limit on a process's memory maps, of which each program of XLA:CPU has three or more.

Linux allows 65,530 unless it is told otherwise. XLA does not survive an allocation that is refused
for that: it ends the process.
"""

from __future__ import annotations

from pathlib import Path

from tpu_core.errors import CompilationError

# Programs between two counts at most; a count takes a millisecond for a thousand maps.
_EVERY = 64
# Maps that a program may have: a training step of a small residual network has 200. As many are
# left for one more program, and for what else a process does.
_OF_A_PROGRAM = 2_048

_LIMIT = Path("/proc/sys/vm/max_map_count")
_MAPS = Path("/proc/self/maps")


class MemoryMaps:
    """Counts memory maps now and then.

    Example:
        >>> maps = MemoryMaps()
        >>> maps.check("train.py:12")  # before each program that is made or loaded
    """

    def __init__(self) -> None:
        self._until_count = 1

    def check(self, line: str | None = None) -> None:
        """Refuse a program for which there may be no memory maps.

        Args:
            line: The user's, for the error.

        Raises:
            CompilationError: The process has nearly as many maps as it may have.
        """
        self._until_count -= 1
        if self._until_count > 0:
            return
        self._until_count = 1  # the next program is refused as well
        try:
            maps, limit = _MAPS.read_bytes().count(b"\n"), int(_LIMIT.read_text())
        except OSError:  # no Linux, and no such limit that could be read
            return
        room = limit - _OF_A_PROGRAM - maps
        if room >= 0:
            self._until_count = max(1, min(room // _OF_A_PROGRAM, _EVERY))
            return
        raise CompilationError(
            "Too many programs: the process has nearly as many memory maps as it may have.",
            values={"memory maps": f"{maps:,}", "limit": f"{limit:,}"},
            line=line,
            remedy="Raise the limit (sysctl -w vm.max_map_count=1000000), or have fewer programs: "
            "torch.tpu.compile_report() says why there are many.",
        )
