"""A program for which the process has no memory maps left is refused, and does not end it."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

OF_LINUX = Path("/proc/sys/vm/max_map_count")
LIMIT = int(OF_LINUX.read_text()) if OF_LINUX.exists() else 0
MOST = 200_000  # maps that the test makes in some seconds
MANY = """
import ctypes, torch
x = torch.ones(4, device="tpu")
x.add(1).cpu()
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p] + [ctypes.c_long] * 5
for i in range({maps}):
    libc.mmap(None, {page}, 1 + 2 * (i % 2), 0x22, -1, 0)  # neighbours differ, and stay apart
try:
    for i in range(200):
        y = x
        for j in range(8):
            y = y.exp() if i >> j & 1 else y.tanh()
        y.cpu()
except tpu_core.errors.CompilationError as error:
    print(error)
"""


@pytest.mark.of_cpu(reason="programs of other platforms have no memory maps")
@pytest.mark.skipif(
    not 0 < LIMIT <= MOST,
    reason="only Linux has the limit, and a machine whose own is higher takes long to come to it",
)
def test_too_many_programs_are_refused() -> None:
    code = "import tpu_core\n" + MANY.format(maps=LIMIT - 2_600, page=mmap.PAGESIZE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Too many programs" in done.stdout and "vm.max_map_count" in done.stdout
