"""The last of three processes is killed; the two others go on by themselves."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from tpu_core.errors import PeerLostError

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("tpu", RANK)
LOST = SIZE - 1

kept: dict[str, torch.Tensor] = {}


def case_killed() -> None:
    dist.init_process_group()
    kept["model"] = torch.full((3,), 1.0 + RANK, device=DEVICE)
    dist.all_reduce(kept["model"])
    if RANK == LOST:
        assert kept["model"].sum().item() == 18
        print('CASE ["case_killed", null]\nCASE ["case_smaller", null]', flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLostError, match=f"missing: rank {LOST}"):
        for _ in range(1000):
            dist.all_reduce(kept["model"].clone())
    assert time.monotonic() - started < 10


def case_smaller() -> None:
    assert (kept["model"] + 1).tolist() == [7.0] * 3
    dist.destroy_process_group()
    port = int(os.environ["MASTER_PORT"]) + 1
    store = dist.TCPStore("localhost", port, is_master=RANK == 0)
    dist.init_process_group(store=store, rank=RANK, world_size=SIZE - 1)
    dist.all_reduce(kept["model"])
    assert kept["model"].tolist() == [12.0] * 3
    time.sleep(12)  # longer than the former world's heartbeats
    dist.all_reduce(kept["model"])
    assert kept["model"].tolist() == [24.0] * 3
