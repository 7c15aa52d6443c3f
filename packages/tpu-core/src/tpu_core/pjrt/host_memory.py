"""Freed memory stays with the process, where XLA's CPU is the device.

XLA:CPU takes its temporaries from the C library at each run and frees them after it. glibc maps and
unmaps blocks over 32 MB every time, and the kernel zeroes each of their pages again at its first
touch: a sixth of the time of a GPT's training step.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

# Parameters of mallopt (malloc.h).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_KEPT_AT_MOST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Take large blocks from the heap, which keeps what is freed; true where that is possible.

    Concerns the whole process, and works with glibc only. An allocator that replaces glibc's, such
    as jemalloc, is left as it is: `mallopt` does nothing then.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    # A thread's own arena cannot hold large blocks: they would be mapped after all.
    parameters = ((_MMAP_MAX, 0), (_ARENA_MAX, 1), (_TRIM_THRESHOLD, _KEPT_AT_MOST))
    return all(mallopt(name, value) == 1 for name, value in parameters)


def give_back_free_memory() -> None:
    """Give the pages of free blocks back to the system, wherever in the heap they are.

    Around the compile of a large program: the compiler's small blocks land in the memory that the
    last program's temporaries had, so that the next program's need new memory beside it.
    """
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _of_glibc(function: str) -> Any:
    """A function of the C library, or None where it is another one."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform == "linux" else None
