"""Collectives that fuse into the programs of `tpu_distributed.spmd()`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import tpu_distributed
from rank_tensors import DEVICE, RANK, SIZE
from tpu_core.errors import CollectiveMismatchError, CollectiveTimeoutError, SpmdMismatchWarning
from tpu_distributed.traced_collectives import STALLS

TOTAL = SIZE * (SIZE + 1) / 2


def started() -> int:
    """How many programs ran so far, single collectives among them."""
    return int(torch.tpu.metrics()["executions"])


def compiled() -> int:
    """How many programs were compiled or loaded."""
    metrics = torch.tpu.metrics()
    return int(metrics["compiles"] + metrics["cache_hits_disk"])


def warned(run: Callable[[], object]) -> list[str]:
    """What is warned of in a function about programs that differ."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if issubclass(w.category, SpmdMismatchWarning)]


def case_one_program() -> None:
    dist.init_process_group()
    warnings.simplefilter("error", SpmdMismatchWarning)
    x = torch.full((4,), 1.0 + RANK, device=DEVICE)
    for _ in range(3):
        with tpu_distributed.spmd():
            before = started()
            y = x * 2
            dist.all_reduce(y)
            z = y + 1
        assert started() == before + 1
        assert z.tolist() == [2 * TOTAL + 1] * 4
        assert y.tolist() == [2 * TOTAL] * 4
        assert started() == before + 1


def case_several_collectives() -> None:
    @tpu_distributed.spmd()
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        work = dist.all_reduce(x, async_op=True)
        gathered = torch.zeros(SIZE * 2, device=DEVICE)
        with tpu_distributed.spmd():  # one region
            assert work is not None
            work.wait()
            dist.all_gather_into_tensor(gathered, x * (RANK + 1))
        dist.broadcast(x, 1)
        return gathered, funcol.all_reduce(x, "max", dist.group.WORLD) + 1

    records = len(tpu_distributed.flight_recorder().records())
    before = started()
    gathered, largest = step(torch.full((2,), 1.0 + RANK, device=DEVICE))
    assert started() <= before + 2  # what was before the region, and it
    assert gathered.tolist() == [TOTAL * (1 + r) for r in range(SIZE) for _ in range(2)]
    assert largest.tolist() == [TOTAL + 1] * 2
    new = tpu_distributed.flight_recorder().records()[records:]
    assert [r["kind"] for r in new] == [
        "all_reduce",
        "all_gather_into_tensor",
        "broadcast",
        "all_reduce",
    ]
    assert [r["sequence"] for r in new] == list(range(new[0]["sequence"], new[-1]["sequence"] + 1))
    assert all("cases_spmd.py" in str(r["line"]) for r in new[:3]), new


def case_ranks_that_differ() -> None:
    x = torch.full((4,), 1.0 + RANK, device=DEVICE)

    def region() -> None:
        with tpu_distributed.spmd():
            y = x * 2 if RANK == 0 else x + 1
            dist.all_reduce(y)
            z = y + 1
            dist.all_reduce(z)
        expected = 2 + sum(r + 2 for r in range(1, SIZE))
        assert y.tolist() == [expected] * 4
        assert z.tolist() == [SIZE * (expected + 1)] * 4

    for _ in range(2):
        (text,) = warned(region)
        assert "rank 0: aten.mul.Tensor float32[4] at" in text
        assert "rank 1: aten.add.Tensor float32[4] at" in text
        assert "cases_spmd.py" in text


def case_one_rank_reads() -> None:
    x = torch.full((3,), 1.0 + RANK, device=DEVICE)

    def region() -> None:
        with tpu_distributed.spmd():
            y = x * 3
            dist.all_reduce(y)
            if RANK == 0:
                assert y.tolist() == [3 * TOTAL] * 3
            z = y + 1
            dist.all_reduce(z)
        assert z.tolist() == [SIZE * (3 * TOTAL + 1)] * 3

    assert warned(region)
    assert not warned(case_one_program_again)


def case_one_program_again() -> None:
    x = torch.full((4,), 1.0 + RANK, device=DEVICE)
    with tpu_distributed.spmd():
        y = x * 2
        dist.all_reduce(y)
    assert y.tolist() == [2 * TOTAL] * 4


def case_nobody_reads_on_one_rank() -> None:
    """A collective is carried out on all ranks, whoever wants its result."""
    x = torch.full((5,), 1.0 + RANK, device=DEVICE)

    def region() -> None:
        with tpu_distributed.spmd():
            y = x * 2
            dist.all_reduce(y)
            if RANK == 0:
                del y
        if RANK == 1:
            assert y.tolist() == [2 * TOTAL] * 5

    (text,) = warned(region)
    assert "which of their results are used afterwards is not" in text


def case_one_rank_is_out_of_the_region() -> None:
    x = torch.full((300,), 1.0 + RANK, device=DEVICE)  # more than what travels with a message

    def both(y: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(y)
        dist.all_reduce(y, dist.ReduceOp.MAX)
        return y

    def region() -> None:
        y = tpu_distributed.spmd()(both)(x + 0) if RANK == 0 else both(x + 0)
        assert y.unique().tolist() == [TOTAL]

    (text,) = warned(region)
    assert "rank 0: all_reduce sum float32[300] at" in text
    assert "rank 1: out of spmd(): all_reduce sum float32[300] at" in text


def case_other_collectives() -> None:
    x = torch.full((4,), 1.0 + RANK, device=DEVICE)

    def region() -> None:
        with pytest.raises(CollectiveMismatchError, match="rank 1: broadcast from 0 float32") as e:
            with tpu_distributed.spmd():
                y = x * 2
                if RANK == 0:
                    dist.all_reduce(y)
                else:
                    dist.broadcast(y, 0)
        assert "rank 0: all_reduce sum float32[4]" in str(e.value)

    assert warned(region)
    case_one_program_again()


def case_a_rank_that_stalls() -> None:
    """A rank that waits for another by other means still carries out what it recorded."""
    STALLS.seconds = 0.2
    told = torch.zeros(1)
    x = torch.full((6,), 1.0 + RANK, device=DEVICE)

    def region() -> None:
        with tpu_distributed.spmd():
            y = x * 2
            dist.all_reduce(y)
            if RANK == 0:
                assert y.tolist() == [2 * TOTAL] * 6
                dist.send(told, 1)
            elif RANK == 1:
                dist.recv(told, 0)
        assert y.tolist() == [2 * TOTAL] * 6

    region()
    STALLS.seconds = 10.0


def case_a_rank_that_does_not_come() -> None:
    group = dist.new_group(list(range(SIZE)), timeout=timedelta(seconds=1))
    x = torch.full((4,), 1.0 + RANK, device=DEVICE)
    if RANK == 0:
        with pytest.raises(CollectiveTimeoutError, match="all_reduce sum") as e:
            with tpu_distributed.spmd():
                y = x * 2
                dist.all_reduce(y, group=group)
        assert "case_a_rank_that_does_not_come" in str(e.value)
        assert x.tolist() == [1.0] * 4
    dist.monitored_barrier(dist.new_group(backend="gloo"), timedelta(seconds=30))


def case_events() -> None:
    x = torch.full((7,), 1.0 + RANK, device=DEVICE)
    with torch.tpu.device(DEVICE), tpu_distributed.spmd():
        before = started()
        y = x * 2
        event = torch.Event("tpu")
        event.record()
        dist.all_reduce(y)
        assert started() == before  # it cuts when somebody asks for it
        event.synchronize()
        assert started() == before + 1
        assert event.query()
    assert y.tolist() == [2 * TOTAL] * 7


def case_groups() -> None:
    halves = dist.new_group(list(range(SIZE)))
    with tpu_distributed.spmd():
        x = torch.full((4,), 1.0 + RANK, device=DEVICE)
        dist.all_reduce(x)
        dist.all_reduce(x, group=halves)
        part = torch.ones(4, 6, device=DEVICE)[1:3, ::2] * (RANK + 1)
        dist.all_reduce(part.t(), group=halves)
    assert x.tolist() == [TOTAL * SIZE] * 4
    assert part.unique().tolist() == [TOTAL]


def _trained(region: bool) -> tuple[list[torch.Tensor], int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)).to(DEVICE)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(RANK)
    ran = late = 0
    for i in range(5):
        x = torch.randn(8, 6, generator=generator).to(DEVICE)
        before, known = started(), compiled()

        def step(x: torch.Tensor = x) -> None:
            parallel(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        tpu_distributed.spmd()(step)() if region else step()
        torch.accelerator.synchronize(DEVICE)
        ran = started() - before
        late += compiled() - known if i == 4 else 0
    return [p.detach().cpu() for p in model.parameters()], ran, late


def case_training() -> None:
    expected, _, _ = _trained(region=False)
    actual, together, late = _trained(region=True)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)
    assert together == 1
    assert late == 0


def case_compiled_graphs() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = funcol.all_reduce(x @ w, "sum", dist.group.WORLD)
        return (y.relu() * 2).sum()

    compiled_step = torch.compile(step)
    together = tpu_distributed.spmd()(compiled_step)
    x = torch.full((4, 3), 1.0 + RANK, device=DEVICE)
    w = torch.ones(3, 2, device=DEVICE)
    for run in (step, compiled_step, together, together):
        torch.accelerator.synchronize(DEVICE)
        before = started()
        loss = run(x, w)
        torch.accelerator.synchronize(DEVICE)
        ran = started() - before
        assert loss.item() == 4 * 2 * 2 * 3 * TOTAL
    assert ran == 1


def case_again() -> None:
    """A program that was compiled for a group serves a later one of its name and ranks."""
    dist.barrier()
    first = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    store = dist.PrefixStore("again", first)  # a further port may be taken by any process
    dist.init_process_group(store=store, rank=RANK, world_size=SIZE)
    known = compiled()
    case_one_program_again()
    assert compiled() == known
    y = torch.full((4,), 1.0 + RANK, device=DEVICE)
    with pytest.raises(ValueError, match="by the user"), tpu_distributed.spmd():
        dist.all_reduce(y)
        raise ValueError("by the user")
    dist.destroy_process_group()
    assert y.tolist() == [TOTAL] * 4
