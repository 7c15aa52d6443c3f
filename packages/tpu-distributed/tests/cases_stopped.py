"""One of two processes is stopped for half a minute, as a debugger or a full disk may stop it."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tpu_core.errors import CollectiveTimeoutError, PeerLostError

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("tpu", RANK)
# Longer than the coordination service waits for a sign of life.
STOPPED_SECONDS = float(os.environ["STOPPED_SECONDS"])


def case_waited_for() -> None:
    dist.init_process_group()
    stop_the_other()
    x = torch.full((3,), 1.0 + RANK, device=DEVICE)
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 3


def case_not_waited_for() -> None:
    group = dist.new_group(list(range(SIZE)), timeout=timedelta(seconds=3))
    x = torch.ones(3, device=DEVICE)
    dist.all_reduce(x, group=group)
    continued = stop_the_other()
    if RANK == 0:
        with pytest.raises(CollectiveTimeoutError, match="missing: rank 1"):
            dist.all_reduce(x, group=group)
        continued.wait()
    else:
        with pytest.raises((CollectiveTimeoutError, PeerLostError)):
            dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0] * 3
    dist.all_reduce(x)  # the default group had nothing to wait for
    assert x.tolist() == [4.0] * 3


def stop_the_other() -> threading.Event:
    """Stop rank 1 in its next statement. What is returned is set when it goes on."""
    continued = threading.Event()
    processes = [0] * SIZE
    dist.all_gather_object(processes, os.getpid())
    if RANK == 0:
        os.kill(processes[1], signal.SIGSTOP)

        def let_go_on() -> None:
            os.kill(processes[1], signal.SIGCONT)
            continued.set()

        threading.Timer(STOPPED_SECONDS, let_go_on).start()
    else:
        time.sleep(1)
    return continued
