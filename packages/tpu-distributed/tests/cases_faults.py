"""What the ranks of a group are told when they disagree or one is late."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tpu_core.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    ProcessGroupError,
    RecompilationError,
)

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("tpu", RANK)


def case_start() -> None:
    dist.init_process_group()


def case_other_shape() -> None:
    x = torch.ones(2 + RANK, device=DEVICE)
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.all_reduce(x)
    text = str(caught.value)
    assert "rank 0: all_reduce sum float32[2] at " in text
    assert "rank 1: all_reduce sum float32[3] at " in text
    assert "cases_faults.py:" in text
    assert x.tolist() == [1.0] * (2 + RANK)


def case_other_dtype_op_and_kind() -> None:
    x = torch.ones(2, device=DEVICE)
    with pytest.raises(CollectiveMismatchError, match=r"rank 1: all_reduce sum int32\[2\]"):
        dist.all_reduce(x.int() if RANK else x)
    with pytest.raises(CollectiveMismatchError, match=r"rank 0: all_reduce max float32\[2\]"):
        dist.all_reduce(x, dist.ReduceOp.SUM if RANK else dist.ReduceOp.MAX)
    with pytest.raises(CollectiveMismatchError, match=r"rank 1: barrier at"):
        if RANK:
            dist.barrier(device_ids=[RANK])
        else:
            dist.broadcast(x, 0)


def case_still_usable() -> None:
    x = torch.ones(2, device=DEVICE)
    dist.all_reduce(x)
    assert x.tolist() == [SIZE, SIZE]


def case_late() -> None:
    group = dist.new_group(list(range(SIZE)), timeout=timedelta(seconds=1))
    x = torch.ones(2, device=DEVICE)
    if RANK == 1:
        time.sleep(4)
        with pytest.raises((PeerLostError, CollectiveTimeoutError)):
            dist.all_reduce(x, group=group)
    else:
        started = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="missing: rank 1") as caught:
            dist.all_reduce(x, group=group)
        assert "within 1 s" in str(caught.value)
        assert isinstance(caught.value, dist.DistBackendError)
        assert time.monotonic() - started < 10
    with pytest.raises(ProcessGroupError, match="earlier collective"):
        dist.all_reduce(x, group=group)
    x += 1  # the device goes on, and so does the default group
    dist.all_reduce(x)
    assert x.tolist() == [2.0 * SIZE] * 2


def case_no_recompile() -> None:
    x, y = torch.ones(3, device=DEVICE), torch.ones(47, device=DEVICE)  # in no other test
    dist.all_reduce(x)
    with torch.tpu.no_recompile():
        dist.all_reduce(x)
        with pytest.raises(RecompilationError, match=r"all_reduce sum float32\[47\] is new"):
            dist.all_reduce(y)
    dist.all_reduce(y)
    assert y.tolist() == [SIZE] * 47


def case_end() -> None:
    dist.barrier()
    dist.destroy_process_group()
