"""Many jobs of two processes one after the other: ``many_jobs.py JOBS``. See test_leaks.py.

The processes are forked from this one, which has imported everything and started nothing: that
costs a fifth of starting each anew.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

import torch
import torch.distributed as dist

import spawn
import tpu_core.compiler.segment  # noqa: F401 - before the forks
import tpu_distributed.backend  # noqa: F401
from tpu_distributed import _autoload

KILLED_EVERY = 5  # in each fifth job, one process is killed


def job(rank: int, killed: bool) -> None:
    """What a process of a job does."""
    dist.init_process_group()
    x = torch.full((300,), 1.0 + rank, device="tpu")
    dist.all_reduce(x)
    gathered = torch.empty(600, device="tpu")
    dist.all_gather_single(gathered, x)
    dist.barrier()
    assert gathered.sum().item() == 1800
    if killed:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(x)
            raise AssertionError("the other process is gone")
        except dist.DistBackendError:
            pass
    dist.destroy_process_group()


def start(rank: int, port: int, killed: bool) -> int:
    """Fork a process of a job."""
    child = os.fork()
    if child:
        return child
    os.environ.update(spawn.rank_environment(rank, 2, port))
    try:
        job(rank, killed)
    except BaseException:  # the fork must not go on with what its parent was doing
        traceback.print_exc()
        os._exit(1)
    sys.exit(0)  # as a program ends: what is registered for the exit runs


def main() -> None:
    if "tpu" not in dist.Backend.backend_list:
        _autoload.load()
    for number in range(1, int(sys.argv[1]) + 1):
        killed = number % KILLED_EVERY == 0
        port = spawn.free_port()
        children = [start(rank, port, killed) for rank in range(2)]
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert ends == ([0, -signal.SIGKILL] if killed else [0, 0]), (number, ends)
        print(f"job {number} has ended; open files: {len(os.listdir('/proc/self/fd'))}", flush=True)


if __name__ == "__main__":
    main()
