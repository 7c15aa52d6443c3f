"""Jobs leave nothing behind: no process, port, file or shared memory."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import many_jobs
import spawn
from tpu_distributed.flight_records import recorder

JOBS = 100
SHARED_MEMORY = Path("/dev/shm")


def processes_with(variable: str) -> dict[int, str]:
    """Command lines of the processes with something in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if variable.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return found


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def shared_memory() -> set[str]:
    """Names of what is in shared memory and mapped by no process."""
    mapped = "".join(maps())
    return {name for name in os.listdir(SHARED_MEMORY) if f"{SHARED_MEMORY}/{name}" not in mapped}


def maps() -> Iterator[str]:
    for file in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # as above
            yield file.read_text()


def run(jobs: int, variable: str, **environment: str) -> str:
    """What `many_jobs` prints; all that its processes started must end soon after it."""
    name, value = variable.split("=")
    result = subprocess.run(
        [sys.executable, many_jobs.__file__, str(jobs)],
        env=spawn.environment(**environment, **{name: value}),
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    deadline = time.monotonic() + 10
    while left := processes_with(variable):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(1100)
def test_many_jobs_leave_nothing_behind(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("TMPDIR", "TPU_CACHE_DIR", "TPU_FLIGHT_DIR")}
    for folder in folders.values():
        folder.mkdir()
    environment = {name: str(folder) for name, folder in folders.items()}
    variable = f"TPU_TEST_JOBS={uuid.uuid4().hex}"
    # The first jobs fill the cache, and one of them leaves a flight record, as it should.
    run(many_jobs.KILLED_EVERY, variable, **environment)
    cached, memory = files(folders["TPU_CACHE_DIR"]), shared_memory()
    printed = run(JOBS, variable, **environment)
    # Ports are open as long as the process that opened them.
    open_files = re.findall(r"open files: (\d+)", printed)
    assert len(open_files) == JOBS
    assert len(set(open_files)) == 1, open_files
    assert files(folders["TPU_CACHE_DIR"]) == cached
    assert not files(folders["TMPDIR"])
    assert shared_memory() <= memory
    killed = 1 + JOBS // many_jobs.KILLED_EVERY
    assert len(list(folders["TPU_FLIGHT_DIR"].iterdir())) == min(killed, recorder._RUNS_KEPT)
