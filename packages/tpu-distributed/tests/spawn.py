"""Runs cases in processes of their own, each rank one, and says how each case went."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

# For where the package is on the path, but not installed.
REGISTER = """
import torch.distributed
from tpu_distributed import _autoload
if "tpu" not in torch.distributed.Backend.backend_list:
    _autoload.load()
"""

NOT_RUN = "not run: an earlier case failed, or its process ended"


def cases_of(module: str) -> list[str]:
    """Names of the functions ``case_*`` of a module beside this one, in order."""
    text = (Path(__file__).parent / f"{module}.py").read_text()
    return re.findall(r"^def (case_\w+)", text, re.MULTILINE)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def own_address_towards(host: str) -> str | None:
    """The address from which this machine reaches another one; None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def environment(**more: str) -> dict[str, str]:
    """That of this process, with the packages of this repository on the path."""
    package = Path(__file__).parents[1]
    sources = [str(package / "src"), str(package.parent / "tpu-core" / "src")]
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([*sources, *([inherited] if inherited else [])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def start(module: str, size: int, *, expected: float, **more: str) -> list[subprocess.Popen[str]]:
    """Processes that run the cases of a module; each prints a line of JSON for each case."""
    port = free_port()
    command = [sys.executable, __file__, module, str(expected)]
    return [
        subprocess.Popen(
            command,
            env=environment(**rank_environment(rank, size, port), **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(size)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout: float) -> list[str]:
    """What each printed; whoever is still there after ``timeout`` seconds is ended."""
    outputs = []
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            outputs.append(process.communicate()[0])
    return outputs


def run(module: str, size: int, timeout: float, **more: str) -> dict[str, str]:
    """Run the cases of a module in ``size`` processes.

    Returns:
        For each case that failed in some rank, what went wrong.
    """
    outputs = finish(start(module, size, expected=timeout, **more), timeout)
    names = cases_of(module)
    failures = {}
    for name in names:
        problems = []
        for rank, output in enumerate(outputs):
            results = _results(output)
            tail = "" if any(results.values()) else f"\n{output[-3000:]}"
            problem = results.get(name, NOT_RUN + tail)
            if problem:
                problems.append(f"rank {rank}: {problem}")
        if problems:
            failures[name] = "\n".join(problems)
    return failures


def _results(output: str) -> dict[str, str | None]:
    found = {}
    for line in output.splitlines():
        if line.startswith("CASE "):
            name, problem = json.loads(line[5:])
            found[name] = problem
    return found


def main() -> None:
    import faulthandler

    faulthandler.dump_traceback_later(float(sys.argv[2]) - 2, exit=True)
    import torch
    import torch.distributed as dist

    from tpu_distributed import _autoload

    if "tpu" not in dist.Backend.backend_list:
        _autoload.load()  # the package is not installed, but on the path
    module = importlib.import_module(sys.argv[1])
    torch.manual_seed(0)
    for name in cases_of(sys.argv[1]):
        started = time.process_time()
        try:
            getattr(module, name)()
        except BaseException:
            print("CASE", json.dumps([name, traceback.format_exc()]), flush=True)
            break
        print("CASE", json.dumps([name, None]), flush=True)
        print(f"{name}: {time.process_time() - started:.2f} s of this process", flush=True)
    sys.stdout.flush()
    # Not by the interpreter: a rank whose case failed must not wait for the others.
    os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
