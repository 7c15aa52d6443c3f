"""A program for which the process has no memory maps left is refused, and does not end it."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_core.compiler import memory_maps
from tpu_core.errors import CompilationError

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


@pytest.mark.parametrize("of_a_program", [3, 200, 500, 1_500])
def test_large_programs_are_counted_more_often(
    of_a_program: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, count = 65_530, 1_000
    for name, text in (("_LIMIT", f"{limit}\n"), ("_MAPS", "")):
        monkeypatch.setattr(memory_maps, name, tmp_path / name)
        (tmp_path / name).write_text(text)
    maps = memory_maps.MemoryMaps()
    with pytest.raises(CompilationError, match="Too many programs"):
        while count < limit:
            (tmp_path / "_MAPS").write_bytes(b"\n" * count)
            maps.check()
            count += of_a_program
    assert limit - 4_096 < count < limit
    with pytest.raises(CompilationError, match="Too many programs"):
        maps.check()
