"""A check in a process of its own: for what must hold before first use, or with other settings."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run_python(code: str, *options: str, **environment: str) -> str:
    """Run ``code`` in a new interpreter and return what it prints, both streams together.

    Raises:
        AssertionError: The interpreter ended with an error; the message is its output.
    """
    result = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout
