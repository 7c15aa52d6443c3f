"""Freed memory stays with the process, where XLA's CPU is the device.

XLA:CPU takes its temporaries from the C library at each run and frees them after it. glibc maps and
unmaps blocks over 32 MB every time, and the kernel zeroes each of their pages again at its first
touch: a sixth of the time of a GPT's training step.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from tpu_core import _C

# Parameters of mallopt (malloc.h).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_KEPT_AT_MOST = 2**31 - 1
_FREE_PART = 16


def host_memory() -> int:
    """Bytes of memory of this machine, which those of devices on the CPU platform share."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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


def limit_free_memory() -> None:
    """Give free memory back to the system where it is more than a part of the machine's.

    glibc before 2.38 seldom fits an aligned block into the hole that one of its size has left, so
    that a chain of ops on large tensors takes several times what it needs.
    """
    _C.limit_free_memory(host_memory() // _FREE_PART)


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
