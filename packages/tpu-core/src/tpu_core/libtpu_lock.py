"""The process that holds libtpu's lock on a machine's chips."""

from __future__ import annotations

import os
import re
from pathlib import Path

REMEDY = (
    "Wait for that process or end it; where no process holds the lock, remove the file. Under "
    "torchrun start one process for each chip."
)
_LOCKFILE = re.compile(r"\S*libtpu_lockfile")


def explain(text: str) -> dict[str, object]:
    """Addition to an error of libtpu about its lock file.

    Args:
        text: libtpu's message.

    Returns:
        The file, and the process that holds it or what to do where none does; empty for other
        messages.
    """
    match = _LOCKFILE.search(text)
    if match is None:
        return {}
    file = Path(match[0].strip("\"'`"))
    holders = lock_holders(file)
    if holders:
        return {"lock": file, "held by": ", ".join(_named(pid) for pid in holders)}
    return {"lock": f"{file}, held by no process: remove it"}


def lock_holders(file: Path, locks: Path = Path("/proc/locks")) -> list[int]:
    """Processes that hold a lock of a file.

    Args:
        file: The file.
        locks: Linux's list of all locks.

    Returns:
        Process ids; 0 for a process of another container.
    """
    try:
        status = file.stat()
        lines = locks.read_text().splitlines()
    except OSError:
        return []
    exact, same_number = set(), set()
    for line in lines:  # "1: FLOCK  ADVISORY  WRITE 708 08:01:12345 0 EOF"
        fields = line.split()
        if "->" in fields or len(fields) < 6:  # "->": it waits for the lock
            continue
        major, minor, inode = fields[5].split(":")
        if int(inode) != status.st_ino:
            continue
        same_number.add(max(0, int(fields[4])))
        if os.makedev(int(major, 16), int(minor, 16)) == status.st_dev:
            exact.add(max(0, int(fields[4])))
    # A file system over another, as of containers, has a device of its own.
    return sorted(exact or same_number)


def _named(pid: int) -> str:
    if pid == 0:
        return "a process of another container"
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        command = ""
    return f"process {pid} ({command})" if command else f"process {pid}"
