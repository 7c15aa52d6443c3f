"""Two processes run collectives of many groups, while strangers come to all ports."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tpu_distributed import rendezvous
from tpu_distributed.connections import Connections

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("tpu", RANK)
GROUPS = int(os.environ["GROUPS"])


class LateConnections(Connections):
    """Leaves the ports of both ranks, of the agreement and of the ring, open for a while.

    The first pair stays open until each rank has dropped a connection.
    """

    _drop = threading.Event()
    _is_first = True

    def _reach(self, store: Any, *what: Any) -> socket.socket:
        time.sleep(0.4)
        if LateConnections._is_first:
            LateConnections._is_first = False
            assert self._drop.wait(50)
            store.set(f"drop/{RANK}", "")
            store.wait([f"drop/{rank}" for rank in range(SIZE)], timedelta(seconds=50))
        return super()._reach(store, *what)

    @classmethod
    def note(cls, record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("Dropped a connection"):
            cls._drop.set()
        return True


logging.getLogger("tpu_distributed").addFilter(LateConnections.note)


@mock.patch.object(rendezvous, "Connections", LateConnections)
def case_collectives_are_right() -> None:
    dist.init_process_group(timeout=timedelta(seconds=60))
    for number in range(GROUPS):
        group = dist.new_group(list(range(SIZE)), timeout=timedelta(seconds=60))
        for elements in (3, 5000):  # with the agreement, and around a ring
            x = torch.full((elements,), float(number + RANK), device=DEVICE)
            dist.all_reduce(x, group=group)
            assert x.eq(2 * number + 1).all().item(), (number, x)
        parts = [torch.empty(2, device=DEVICE) for _ in range(SIZE)]
        dist.all_gather(parts, torch.full((2,), float(RANK), device=DEVICE), group=group)
        assert torch.stack(parts).tolist() == [[0.0, 0.0], [1.0, 1.0]]
        message = torch.full((4,), float(number), device=DEVICE)
        if RANK == 0:
            dist.send(message, 1, group=group)
        else:
            message.zero_()
            dist.recv(message, 0, group=group)
        assert message.tolist() == [number] * 4
        dist.destroy_process_group(group)


def case_the_coordinator_is_killed() -> None:
    if RANK == 0:
        (coordinator,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert b"coordinator.py" in Path(f"/proc/{coordinator}/cmdline").read_bytes()
        os.kill(int(coordinator), signal.SIGKILL)
    time.sleep(0.5)  # jaxlib would end this process at once
    x = torch.full((5000,), 1.0 + RANK, device=DEVICE)
    dist.all_reduce(x)
    assert x.eq(3).all().item()
    parts = [torch.empty(2, device=DEVICE) for _ in range(SIZE)]
    dist.all_gather(parts, torch.full((2,), float(RANK), device=DEVICE))
    assert torch.stack(parts).tolist() == [[0.0, 0.0], [1.0, 1.0]]


def case_end() -> None:
    dist.barrier()
    dist.destroy_process_group()
