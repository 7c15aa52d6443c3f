"""Faults injected into three processes: what each of them is told, and after how long.

The time is counted from a barrier right after which the fault happens. A process that gets an error
then computes on its device again, to show that it is alive.

    python integration/benchmarks/faults.py --json out.json
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import harness
import ranks

PROCESSES, VICTIM = 3, 2
TIMEOUT_SECONDS = 10  # of the group that does not wait for a process that is stopped


def main() -> None:
    if "RANK" in os.environ:
        rank(sys.argv[1])
        return
    options = harness.arguments(__doc__, stopped_seconds=30)
    os.environ["STOPPED_SECONDS"] = str(options.stopped_seconds)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TPU_FLIGHT_DIR"] = folder
        rows = [row for fault in FAULTS for row in injected(fault)]
    harness.report(f"Faults in {PROCESSES} processes", rows, options)


def injected(fault: str) -> list[dict[str, Any]]:
    """What the processes say of a fault, by rank."""
    streams = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = ranks.start(__file__, PROCESSES, fault, **streams)
    rows = []
    for number, process in enumerate(processes):
        assert process.stdout
        printed = [""]
        while (line := process.stdout.readline()) and not line.startswith("{"):
            printed.append(line.strip())
        if line:
            said = json.loads(line)
        else:
            code = process.wait(60)
            last = printed[-1].partition("]: ")[2] if code > 0 else ""
            said = {"seconds": None, "printed": last or "nothing", "then": ended(code)}
        rows.append({"fault": "" if number else fault, "rank": number, **said})
    for process in processes:
        assert process.stdin
        process.stdin.close()  # it waits for that, so that none is gone before all are told
        process.wait(60)
    return rows


def ended(code: int) -> str:
    """How a process ended."""
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def rank(fault: str) -> None:
    """One of the processes: print what it is told as JSON."""
    import torch
    import torch.distributed as dist

    from tpu_core.errors import TpuError

    dist.init_process_group()
    x = torch.ones(4, device="tpu")
    dist.all_reduce(x)
    waiting = dist.new_group(list(range(PROCESSES)), timeout=timedelta(seconds=TIMEOUT_SECONDS))
    dist.barrier(device_ids=[dist.get_rank()])
    started = time.monotonic()
    try:
        FAULTS[fault](dist.get_rank(), x, waiting)
        told = "nothing: the result is there"
    except TpuError as error:
        told = "\n".join(relevant(str(error)))
    seconds = time.monotonic() - started
    went_on = (x.clone() * 0 + dist.get_rank()).tolist() == [dist.get_rank()] * 4
    then = "goes on" if went_on else "computes something else"
    print(json.dumps({"seconds": seconds, "printed": told, "then": then}), flush=True)
    sys.stdin.read()
    os._exit(0)  # there is nobody left to take leave of


def relevant(message: str) -> list[str]:
    """Of an error: what happened, what each rank called, and who is missing."""
    lines = message.splitlines()
    wanted = ("rank ", "missing")
    return [lines[0], *(s for line in lines[1:] if (s := line.strip()).startswith(wanted))]


def killed(rank: int, x: Any, waiting: Any) -> None:
    """``kill -9`` while the others are in a collective."""
    import torch.distributed as dist

    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(1000):
        dist.all_reduce(x.clone())


def raises(rank: int, x: Any, waiting: Any) -> None:
    """An error of the program's own that nobody catches."""
    import torch.distributed as dist

    if rank == VICTIM:
        raise ValueError("a sample that cannot be read")
    for _ in range(1000):
        dist.all_reduce(x.clone())


def stopped(rank: int, group: Any) -> None:
    """SIGSTOP, for as long as a debugger or a full disk may stop a process."""
    import torch
    import torch.distributed as dist

    if rank == VICTIM:
        seconds = os.environ["STOPPED_SECONDS"]
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    y = torch.ones(4, device="tpu")
    dist.all_reduce(y, group=group)
    assert y.tolist() == [PROCESSES] * 4


def order(rank: int, x: Any, waiting: Any) -> None:
    """Two collectives the other way round."""
    import torch.distributed as dist

    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(x.clone()),
        lambda: dist.broadcast(x.clone(), 0),
    ]
    for call in reversed(calls) if rank == VICTIM else calls:
        call()


def shape(rank: int, x: Any, waiting: Any) -> None:
    """An all_reduce of fewer elements."""
    import torch.distributed as dist

    dist.all_reduce(x[: 3 if rank == VICTIM else 4].clone())


FAULTS: dict[str, Callable[[int, Any, Any], None]] = {
    "kill -9": killed,
    "one rank raises": raises,
    "SIGSTOP, time-out of 10 s": lambda rank, x, waiting: stopped(rank, waiting),
    "SIGSTOP, time-out of 30 min": lambda rank, x, waiting: stopped(rank, None),
    "other order": order,
    "other shape": shape,
}


if __name__ == "__main__":
    main()
