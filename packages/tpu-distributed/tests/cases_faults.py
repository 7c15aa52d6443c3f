"""What the ranks of a group are told when they disagree or one is late."""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tpu_distributed
from tpu_core.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    ProcessGroupError,
    RecompilationError,
)
from tpu_core.pjrt import distributed
from tpu_distributed.dispatcher import SENDER, Task
from tpu_distributed.flight_records import report

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("tpu", RANK)


def case_start() -> None:
    dist.init_process_group()


def case_flight_records() -> None:
    x = torch.ones(2, 3, device=DEVICE)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    dist.barrier(device_ids=[RANK])  # without, it is gloo's
    if RANK == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    reduced, barrier, message = tpu_distributed.flight_recorder().records()
    assert reduced["call"] == "all_reduce max float32[2, 3]"
    assert reduced["line"].partition(":")[0].endswith("cases_faults.py")
    assert (reduced["kind"], reduced["shapes"], reduced["dtypes"]) == (
        "all_reduce",
        [[2, 3]],
        ["float32"],
    )
    assert (reduced["group"], reduced["ranks"], reduced["sequence"]) == ("0", [0, 1], 1)
    assert (barrier["call"], barrier["sequence"]) == ("barrier", 2)
    assert message["call"] == ("recv from 0" if RANK else "send to 1") + " float32[2, 3]"
    assert message["sequence"] is None
    for record in (reduced, barrier, message):
        assert record["state"] == "done", record
        assert record["called"] <= record["done"]
    line = f"0 #1 all_reduce max float32[2, 3] done at {reduced['line']}"
    assert str(tpu_distributed.flight_recorder()).splitlines()[0] == line


def dump_of(rank: int) -> Path:
    run = distributed.World.current()
    assert run is not None
    return Path(os.environ["TPU_FLIGHT_DIR"]) / run.name / f"rank-{rank}.json"


def case_other_shape() -> None:
    x = torch.ones(2 + RANK, device=DEVICE)
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.all_reduce(x)
    text = str(caught.value)
    assert "rank 0: all_reduce sum float32[2] at " in text
    assert "rank 1: all_reduce sum float32[3] at " in text
    assert "cases_faults.py:" in text
    assert x.tolist() == [1.0] * (2 + RANK)
    assert f"flight record: {dump_of(RANK)}" in text
    records = json.loads(dump_of(RANK).read_text())["records"]
    assert (records[-1]["state"], records[-1]["shapes"]) == ("failed", [[2 + RANK]])
    dist.barrier()  # of gloo: both have written
    (finding,) = report.findings(report.read(dump_of(RANK).parent))
    assert finding.startswith(
        "Group '0': collective 3 differs. rank 0: all_reduce sum float32[2] at "
    )
    assert "rank 1: all_reduce sum float32[3] at " in finding


def case_other_shape_found_later() -> None:
    x = torch.ones(2 + RANK, device=DEVICE)
    before = x * 3
    recorded = threading.Event()
    SENDER.put(Task(lambda: recorded.wait(60)), waits=False)  # till then, nothing is known
    works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
    after = x + 1
    recorded.set()
    for _ in range(2):
        with pytest.raises(
            CollectiveMismatchError, match=r"rank 1: all_reduce sum float32\[3\] at"
        ):
            after.tolist()
    with pytest.raises(CollectiveMismatchError, match=r"\n  at .*cases_faults.py:\d+"):
        x + 1
    for work in reversed(works):
        assert work is not None and work.is_completed() and not work.is_success()
        with pytest.raises(CollectiveMismatchError):
            work.wait()
    assert x.tolist() == [1.0] * (2 + RANK)
    assert before.tolist() == [3.0] * (2 + RANK)


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


def case_split_sizes_that_disagree() -> None:
    # Rows that each rank gives and gets, and a pair that disagrees: source, destination, elements.
    for gives, gets, pair in (
        (([1, 2], [2, 2]), ([1, 1], [2, 2]), (1, 0, 6, 3)),
        (([1, 4], [3, 1]), ([1, 3], [3, 1]), (0, 1, 12, 9)),
        (([0, 0], [0, 0]), ([0, 0], [1, 0]), (0, 1, 0, 3)),  # nothing would be sent
        (([0, 1], [1, 0]), ([0, 2], [1, 0]), (1, 0, 3, 6)),  # one part each
    ):
        x = torch.ones(sum(gives[RANK]), 3, device=DEVICE)
        out = torch.full((sum(gets[RANK]), 3), 7.0, device=DEVICE)
        said = "rank {0} sends {2} elements, rank {1} expects {3}".format(*pair)
        with pytest.raises(CollectiveMismatchError, match=said) as caught:
            dist.all_to_all_single(out, x, gets[RANK], gives[RANK])
        assert "cases_faults.py" in str(caught.value)
        assert out.eq(7).all().item()  # nothing was written
    xs = [torch.ones(2, device=DEVICE) for _ in range(SIZE)]
    outs = [torch.zeros(2 + RANK, device=DEVICE) for _ in range(SIZE)]
    with pytest.raises(CollectiveMismatchError, match="rank 0 sends 2 elements, rank 1 expects 3"):
        dist.all_to_all(outs, xs)


def case_split_sizes_on_one_rank() -> None:
    x, out = torch.ones(4, 3, device=DEVICE), torch.full((4, 3), 7.0, device=DEVICE)
    for sizes in ([2, 2], [1, 3]):
        given = (sizes, sizes) if RANK else ()
        with pytest.raises(CollectiveMismatchError, match="all_to_all"):
            dist.all_to_all_single(out, x, *given)
            torch.tpu.synchronize()
    # Sizes that one rank refuses by itself: the other must not wait for it.
    odd = torch.ones(3, 3, device=DEVICE)
    for own in ((odd.clone(), odd), (out, x, [1, 1], [2, 2]), (out, x, [4], [4])):
        refused = (ValueError, RuntimeError) if RANK else CollectiveMismatchError
        with pytest.raises(refused):
            dist.all_to_all_single(*(own if RANK else (out, x, [2, 2], [2, 2])))
    assert out.eq(7).all().item()


def case_arguments_that_pytorch_refuses() -> None:
    x = torch.arange(3.0, device=DEVICE)
    calls = {
        "invalid root rank: 5": [lambda: dist.broadcast(x, 5), lambda: dist.reduce(x, 5)],
        "invalid root rank: -1": [lambda: dist.broadcast(x, -1)],
        "invalid output tensor list at index 0 .expected length 2, got 3.": [
            lambda: dist.all_gather([torch.zeros_like(x) for _ in range(3)], x)
        ],
        "invalid output tensor list at index 0 .expected length 2, got 1.": [
            lambda: dist.all_gather([torch.zeros_like(x)], x),
            lambda: dist.all_to_all([torch.zeros_like(x)], [x, x]),
        ],
        "invalid input tensor list at index 0 .expected length 2, got 3.": [
            lambda: dist.reduce_scatter(torch.zeros_like(x), [x] * 3)
        ],
        "send: invalid rank: 5": [lambda: dist.send(x, 5)],
        "recv: invalid rank: 5": [lambda: dist.recv(x, 5)],
    }
    for text, refused in calls.items():
        for call in refused:
            with pytest.raises(RuntimeError, match=text):
                call()
    assert x.tolist() == [0, 1, 2]
    dist.all_reduce(x)  # the ranks are in step
    assert x.tolist() == [0, 2, 4]


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
    x, y = torch.ones(3, device=DEVICE), torch.ones(471, device=DEVICE)  # in no other test
    dist.broadcast(x, 0)
    with torch.tpu.no_recompile():
        dist.broadcast(x, 0)
        dist.all_reduce(y)  # by the hosts, without a program
        with pytest.raises(RecompilationError, match=r"broadcast from 0 float32\[471\] is new"):
            dist.broadcast(y, 0)
    dist.barrier()  # or the one finds in the cache what the other compiles
    dist.broadcast(y, 0)
    assert y.tolist() == [SIZE] * 471


def case_end() -> None:
    dist.barrier()
    dist.destroy_process_group()
