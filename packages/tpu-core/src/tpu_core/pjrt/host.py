"""Features of this host's CPU; code for others must not be loaded from a cache."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """A short hash of the CPU's features as the kernel lists them, or its name where it does not.

    Args:
        cpuinfo: The kernel's list.
    """
    features = platform.processor()
    try:
        with cpuinfo.open() as lines:
            # Of the first CPU: the whole file takes long on a machine with many.
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):  # x86, Arm
                    features = " ".join(sorted(value.split()))
                    break
    except OSError:  # not Linux
        pass
    return hashlib.sha256(features.encode()).hexdigest()[:16]


def machine() -> str:
    """The architecture: ``"x86_64"``."""
    return platform.machine()
