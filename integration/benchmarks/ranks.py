"""Starts a benchmark's script again as several processes that make one group."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(script: str, processes: int, *options: str, timeout: float = 1000) -> list[Any]:
    """Run a script with the environment that torchrun sets; ``RANK`` tells it that it is one.

    Args:
        script: Its path.
        processes: How many.
        options: Its arguments.
        timeout: Seconds for each.

    Returns:
        What each printed last, read as JSON, by rank.

    Raises:
        SystemExit: One failed; its output was printed.
    """
    started = start(script, processes, *options)
    outputs = [process.communicate(timeout=timeout)[0] for process in started]
    for rank, process in enumerate(started):
        if process.returncode:
            sys.exit(f"rank {rank} ended with {process.returncode}.\n{outputs[rank]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def start(
    script: str, processes: int, *options: str, **streams: Any
) -> list[subprocess.Popen[str]]:
    """The processes of `run`, started.

    Args:
        script: Its path.
        processes: How many.
        options: Its arguments.
        streams: As `subprocess.Popen` takes them; the output is a pipe unless given.
    """
    with socket.socket() as s:
        s.bind(("", 0))
        port = s.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, script, *options],
            env=environment(rank, processes, port),
            cwd=Path(script).parent,
            text=True,
            **{"stdout": subprocess.PIPE, **streams},
        )
        for rank in range(processes)
    ]


def environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    return {**os.environ, "MASTER_ADDR": "localhost", **{k: str(v) for k, v in numbers.items()}}
