"""A fresh interpreter: for what must hold before first use, at exit, or with other settings."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

# Under a sanitizer (tools/sanitize.py) all takes several times as long.
PATIENCE = 5 if os.environ.get("TPU_CORE_SANITIZE") else 1


def run(
    code: str, *options: str, timeout: float = 100, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter; the result has returncode, stdout and stderr.

    Raises:
        subprocess.TimeoutExpired: It hangs.
    """
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout * PATIENCE,
    )


def clean(code: str, *options: str, timeout: float = 100, **environment: str) -> str:
    """What ``code`` prints; it must end well and write nothing to stderr."""
    result = run(code, *options, timeout=timeout, **environment)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    return result.stdout


def path_with(folder: str | Path) -> str:
    """Value of ``PYTHONPATH`` that has ``folder`` before what it has here."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
