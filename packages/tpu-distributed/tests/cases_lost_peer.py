"""One of three processes is killed; the two others go on by themselves."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tpu_core.errors import PeerLostError
from tpu_core.pjrt import distributed

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("tpu", RANK)
LOST = int(os.environ["LOST"])
# So that jaxlib finds within the test that a process is gone, and HEARTBEATS_END is longer.
distributed._HEARTBEAT_SECONDS = 10
HEARTBEATS_END = 12  # seconds

kept: dict[str, torch.Tensor] = {}


def case_killed() -> None:
    dist.init_process_group()
    kept["model"] = torch.full((3,), 1.0 + RANK, device=DEVICE)
    dist.all_reduce(kept["model"])
    if RANK == LOST:
        assert kept["model"].sum().item() == 18
        for name in ("case_killed", "case_smaller"):
            print("CASE", json.dumps([name, None]), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="was lost"):
        for _ in range(1000):
            dist.all_reduce(kept["model"].clone())
    assert time.monotonic() - started < 10


def case_smaller() -> None:
    assert (kept["model"] + 1).tolist() == [7.0] * 3
    dist.destroy_process_group()
    rank = RANK - (RANK > LOST)
    # A port that the system chose: one that is named beforehand may be another process' by now.
    told = Path(os.environ["TPU_FLIGHT_DIR"]) / "port"
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        told.with_suffix(".new").write_text(str(store.port))
        told.with_suffix(".new").rename(told)
    else:
        while not told.exists():
            time.sleep(0.05)
        store = dist.TCPStore("localhost", int(told.read_text()), is_master=False)
    dist.init_process_group(store=store, rank=rank, world_size=SIZE - 1)
    dist.all_reduce(kept["model"])
    assert kept["model"].tolist() == [12.0] * 3
    time.sleep(HEARTBEATS_END)
    dist.all_reduce(kept["model"])
    assert kept["model"].tolist() == [24.0] * 3
