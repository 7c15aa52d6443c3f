"""An error of libtpu's lock file names the process that holds it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import jax
import pytest

from tpu_core.errors import TpuNotAvailableError
from tpu_core.libtpu_lock import lock_holders
from tpu_core.pjrt import client


def error_of(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is raised where the platform does not start."""

    def local_devices(**_: object) -> list[object]:
        raise RuntimeError(text)

    monkeypatch.setattr(jax, "local_devices", local_devices)
    with pytest.raises(TpuNotAvailableError) as caught:
        client.start()
    return str(caught.value)


def locked(file: Path) -> str:
    return (
        "ABORTED: Internal error when accessing libtpu multi-process lockfile. "
        f'Run "$ sudo rm {file}".'
    )


def test_the_holder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "libtpu_lockfile"
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert lock_holders(file) == [os.getpid()]
        text = error_of(locked(file), monkeypatch)
    assert f"lock: {file}\n" in text
    assert f"held by: process {os.getpid()} (" in text
    assert "Wait for that process or end it" in text


def test_a_stale_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "libtpu_lockfile"
    file.touch()
    assert lock_holders(file) == []
    text = error_of(locked(file), monkeypatch)
    assert f"lock: {file}, held by no process: remove it" in text


def test_lists_of_locks(tmp_path: Path) -> None:
    file = tmp_path / "libtpu_lockfile"
    file.touch()
    status = file.stat()
    major, minor, inode = os.major(status.st_dev), os.minor(status.st_dev), status.st_ino
    place = f"{major:02x}:{minor:02x}:{inode}"
    locks = tmp_path / "locks"
    locks.write_text(
        f"1: FLOCK  ADVISORY  WRITE 708 {place} 0 EOF\n"
        f"1: -> FLOCK  ADVISORY  WRITE 709 {place} 0 EOF\n"
        f"2: POSIX  ADVISORY  WRITE 710 {major:02x}:{minor + 1:02x}:{inode} 0 EOF\n"
        f"3: FLOCK  ADVISORY  WRITE 711 {major:02x}:{minor:02x}:{inode + 1} 0 EOF\n"
        "broken\n"
    )
    assert lock_holders(file, locks) == [708]
    locks.write_text(f"2: POSIX ADVISORY WRITE -1 ff:ff:{inode} 0 EOF\n")
    assert lock_holders(file, locks) == [0]
    assert lock_holders(file, tmp_path / "absent") == []
    assert lock_holders(tmp_path / "absent", locks) == []


def test_other_errors_say_nothing_of_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "lock:" not in error_of("Unable to initialize backend", monkeypatch)
