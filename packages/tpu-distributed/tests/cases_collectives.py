"""Each collective against gloo's result on CPU tensors, in one spawn."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.testing import assert_close

import spawn
import tpu_core
from rank_tensors import DEVICE, DTYPES, RANK, SIZE, everyones, flat, made


def same(run: Callable[[Callable[[torch.Tensor], torch.Tensor]], object]) -> None:
    """``run`` gives the same on the device as on the CPU, where gloo serves it."""
    expected = run(lambda t: t.clone())
    actual = run(lambda t: t.to(DEVICE))
    for e, a in zip(flat(expected), flat(actual), strict=True):
        assert a.device == DEVICE
        assert_close(a.cpu(), e, rtol=0, atol=0)


def case_defaults() -> None:
    x = torch.arange(3.0, device=DEVICE) + RANK  # on the device before there is a group
    kept = x * 2
    pending = kept + 1
    empty = torch.zeros(0, device=DEVICE)
    dist.init_process_group()
    assert dist.get_backend_config() == "tpu:tpu,cpu:gloo"
    assert torch.tpu.device_count() == SIZE
    assert kept.tolist() == [2.0 * i + 2 * RANK for i in range(3)]
    assert pending.tolist() == [2.0 * i + 2 * RANK + 1 for i in range(3)]
    assert torch.cat([empty, kept]).tolist() == kept.tolist()
    dist.all_reduce(x)
    assert x.tolist() == [SIZE * i + SIZE * (SIZE - 1) / 2 for i in range(3)]
    # Whatever tpu device a process names is its own.
    y = torch.ones(2, device="tpu")
    dist.all_reduce(y)
    assert y.tolist() == [SIZE, SIZE]


def case_all_reduce() -> None:
    functions = {
        ReduceOp.SUM: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
    }
    ops = list(functions)
    for i, dtype in enumerate(DTYPES):
        for op in ops if dtype != torch.bool else []:
            if dtype in (torch.float32, torch.int64) or op in (ops[i % 4], ReduceOp.SUM):
                x = made((2, 3), dtype).to(DEVICE)
                expected = functools.reduce(functions[op], everyones(x))
                dist.all_reduce(x, op)
                assert_close(x.cpu(), expected, rtol=0, atol=0)
    for op, expected in ((ReduceOp.AVG, 1.5), (ReduceOp.SUM, 3.0)):
        x = torch.full((2,), 1.0 + RANK, device=DEVICE)
        dist.all_reduce(x, op)
        if SIZE == 2:
            assert x.tolist() == [expected] * 2


def case_all_reduce_of_larger_arrays() -> None:
    half = dist._make_nccl_premul_sum(0.5)
    total = SIZE * (SIZE + 1) / 2
    # With the message by which the ranks agree, in new memory, in that of the operand.
    for elements in (200, 3001, (1 << 20) + 1):
        for op, expected in (
            (ReduceOp.SUM, total),
            (ReduceOp.AVG, total / SIZE),
            (ReduceOp.MAX, float(SIZE)),
            (half, total / 2),
        ):
            x = torch.full((elements,), RANK + 1.0, device=DEVICE)
            kept, y = x * 1, x + 1
            work = dist.all_reduce(x, op, async_op=True)
            z = x + y  # recorded on what is not there yet
            work.wait()
            assert_close(x.cpu(), torch.full((elements,), expected), rtol=0, atol=0)
            assert_close(z.cpu(), torch.full((elements,), expected + RANK + 2), rtol=0, atol=0)
            assert_close(kept.cpu(), torch.full((elements,), RANK + 1.0), rtol=0, atol=0)
    x = torch.full((1 << 21,), 1.5, dtype=torch.bfloat16, device=DEVICE)
    dist.all_reduce(x)
    assert_close(x.cpu(), torch.full((1 << 21,), 1.5 * SIZE, dtype=torch.bfloat16))


def case_bitwise_and_bool() -> None:
    for op, function in (
        (ReduceOp.BAND, torch.bitwise_and),
        (ReduceOp.BOR, torch.bitwise_or),
        (ReduceOp.BXOR, torch.bitwise_xor),
    ):
        x = made((5,), torch.int32).to(DEVICE)
        expected = functools.reduce(function, everyones(x))
        dist.all_reduce(x, op)
        assert_close(x.cpu(), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="BAND takes integers"):
        dist.all_reduce(torch.ones(2, device=DEVICE), ReduceOp.BAND)
    for op, expected in ((ReduceOp.MAX, [True, True, False]), (ReduceOp.MIN, [True, False, False])):
        x = torch.tensor([True, RANK == 0, False], device=DEVICE)
        dist.all_reduce(x, op)
        assert x.tolist() == expected


def case_premultiplied_sum() -> None:
    x = torch.ones(3, device=DEVICE)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert x.tolist() == [SIZE * 0.5] * 3


def case_broadcast() -> None:
    for i, dtype in enumerate([*DTYPES, torch.complex64]):
        x = made((3, 2), dtype).to(DEVICE)
        expected = everyones(x)[i % SIZE]
        dist.broadcast(x, i % SIZE)
        assert_close(x.cpu(), expected, rtol=0, atol=0)
    special = torch.tensor([-0.0, float("nan"), float("-inf"), 1e-45], device=DEVICE)
    x = special if RANK == 0 else torch.zeros(4, device=DEVICE)
    dist.broadcast(x, 0)
    assert_close(x.cpu().view(torch.int32), special.cpu().view(torch.int32))


def case_gathers() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        x = made((2, 3), dtype).to(DEVICE)
        expected = everyones(x)
        outs = [torch.zeros(2, 3, dtype=dtype, device=DEVICE) for _ in range(SIZE)]
        dist.all_gather(outs, x)
        assert_close([o.cpu() for o in outs], expected, rtol=0, atol=0)
        for shape in ((2 * SIZE, 3), (SIZE, 2, 3), (6 * SIZE,)):
            out = torch.zeros(shape, dtype=dtype, device=DEVICE)
            dist.all_gather_into_tensor(out, x)
            assert_close(out.cpu(), torch.cat(expected).view(shape), rtol=0, atol=0)

    def scalar(put: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        outs = [put(torch.zeros(())) for _ in range(SIZE)]
        dist.all_gather(outs, put(made(())))
        return outs

    def to_root(put: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        outs = [put(torch.zeros(4)) for _ in range(SIZE)] if RANK == 1 else None
        dist.gather(put(made((4,))), outs, dst=1)
        return outs or []

    same(scalar)
    same(to_root)
    out = torch.zeros(SIZE, 3, device=DEVICE)  # stacked, not concatenated
    dist.all_gather_into_tensor(out, torch.full((3,), 1.0 + RANK, device=DEVICE))
    assert out[:, 0].tolist() == [1.0 + r for r in range(SIZE)]


def case_uneven_gather() -> None:
    outs = [torch.zeros(2, r + 1, device=DEVICE) for r in range(SIZE)]
    dist.all_gather(outs, torch.full((2, RANK + 1), 1.0 + RANK, device=DEVICE))
    for r, out in enumerate(outs):
        assert_close(out.cpu(), torch.full((2, r + 1), 1.0 + r))


def case_scatters() -> None:
    def lists(put: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        out = put(torch.zeros(2, 2))
        ins = [put(made((2, 2), seed=i)) for i in range(SIZE)] if RANK == 0 else None
        dist.scatter(out, ins, src=0)
        return out

    def reduced(put: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        out = put(torch.zeros(3))
        dist.reduce_scatter(out, [put(made((3,), seed=i)) for i in range(SIZE)])
        return out

    def tensor(put: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        out = put(torch.zeros(2, 3))
        dist.reduce_scatter_tensor(out, put(made((2 * SIZE, 3))))
        return out

    def root(put: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = put(made((4,)))
        dist.reduce(x, dst=1)
        return x if RANK == 1 else put(torch.zeros(1))

    for run in (lists, reduced, tensor, root):
        same(run)
    for op, expected in ((ReduceOp.AVG, 1.0), (ReduceOp.MAX, 1.0)):
        out = torch.zeros(2, device=DEVICE)
        dist.reduce_scatter_tensor(out, torch.ones(2 * SIZE, device=DEVICE), op)
        assert out.tolist() == [expected] * 2
    out = torch.zeros(RANK + 1, device=DEVICE)
    dist.reduce_scatter(out, [torch.full((r + 1,), 1.0 + r, device=DEVICE) for r in range(SIZE)])
    assert out.tolist() == [SIZE * (1.0 + RANK)] * (RANK + 1)


def case_all_to_all() -> None:
    def even(put: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        out = put(torch.zeros(2 * SIZE, 3))
        dist.all_to_all_single(out, put(made((2 * SIZE, 3))))
        return out

    def uneven(put: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        gives = [RANK + to + 1 for to in range(SIZE)]
        gets = [source + RANK + 1 for source in range(SIZE)]
        out = put(torch.zeros(sum(gets), 2))
        dist.all_to_all_single(out, put(made((sum(gives), 2))), gets, gives)
        return out

    same(even)
    same(uneven)
    outs = [torch.zeros(2, r + 1, device=DEVICE) for r in range(SIZE)]
    dist.all_to_all(
        outs, [torch.full((2, RANK + 1), 10.0 * RANK + to, device=DEVICE) for to in range(SIZE)]
    )
    for r, out in enumerate(outs):
        assert_close(out.cpu(), torch.full((2, r + 1), 10.0 * r + RANK))


def case_messages() -> None:
    to, source = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        x = made((2, 3), dtype).to(DEVICE)
        y = torch.zeros(2, 3, dtype=dtype, device=DEVICE)
        sent = dist.isend(x, to)
        received = dist.irecv(y, source)
        sent.wait()
        received.wait()
        assert_close(y.cpu(), everyones(x)[source])
    y = torch.zeros(3, device=DEVICE)
    ops = [
        dist.P2POp(dist.isend, torch.full((3,), 1.0 + RANK, device=DEVICE), to),
        dist.P2POp(dist.irecv, y, source),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert y.tolist() == [1.0 + source] * 3
    if RANK == 0:
        dist.send(torch.arange(4.0, device=DEVICE).view(2, 2).t(), 1, tag=7)
    if RANK == 1:
        z = torch.zeros(2, 2, device=DEVICE)
        assert dist.recv(z, tag=7) == 0  # from any
        assert z.tolist() == [[0.0, 2.0], [1.0, 3.0]]


def case_views_and_order() -> None:
    base = torch.zeros(4, 6, device=DEVICE)
    part = base[1:3, ::2]
    part += RANK + 1
    alias = base.view(-1)
    dist.all_reduce(part)
    total = SIZE * (SIZE + 1) / 2
    assert base[1:3, ::2].unique().tolist() == [total]
    assert base.sum().item() == alias.sum().item() == total * 6
    # A collective reads what was recorded before it and not what comes after.
    x = torch.ones(3, device=DEVICE)
    y = x * (RANK + 1)
    work = dist.all_reduce(y, async_op=True)
    x.zero_()
    assert work is not None
    work.wait()
    z = y + 1
    y.zero_()
    assert z.tolist() == [total + 1] * 3
    t = torch.arange(6.0, device=DEVICE).view(2, 3).t()
    dist.broadcast(t, 0)
    assert t.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def case_work() -> None:
    x = torch.full((2,), 1.0 + RANK, device=DEVICE)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    assert work.wait()
    torch.tpu.synchronize()
    assert work.is_completed() and work.is_success()
    assert work.get_future().value()[0].tolist() == [SIZE * (SIZE + 1) / 2] * 2
    futures = work.get_future().then(lambda f: f.value()[0] * 2)
    assert futures.wait().tolist() == [SIZE * (SIZE + 1.0)] * 2


def case_called_before_others_come() -> None:
    x, told = torch.full((3,), 1.0 + RANK, device=DEVICE), torch.zeros(1)
    if RANK:
        dist.recv(told, RANK - 1)  # that rank has called, and goes on before this one calls
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    y = x * 2  # recorded
    if RANK + 1 < SIZE:
        dist.send(told, RANK + 1)
    total = SIZE * (SIZE + 1) / 2
    assert y.tolist() == [2 * total] * 3
    work.wait()
    assert x.tolist() == [total] * 3


def case_many_in_flight() -> None:
    xs = [torch.full((2 + i % 3,), 1.0 + RANK + i, device=DEVICE) for i in range(12)]
    twice = torch.ones(2, device=DEVICE)
    alias = twice.view(2, 1)
    before = twice.clone()
    groups = [dist.group.WORLD, dist.new_group(list(range(SIZE)))]
    works = []
    for i, x in enumerate(xs):
        works.append(dist.all_reduce(x, group=groups[i % 2], async_op=True))
        if i % 6 == 0:
            works.append(dist.all_reduce(twice, async_op=True))
    gathered = torch.zeros(2 * SIZE, device=DEVICE)
    dist.all_gather_into_tensor(gathered, twice, async_op=True)
    twice += 1  # after the gather has read it
    total = SIZE * (SIZE + 1) / 2
    for i, x in enumerate(xs):
        assert x.tolist() == [total + SIZE * i] * (2 + i % 3)
    assert gathered.tolist() == [float(SIZE) ** 2] * (2 * SIZE)
    assert alias.tolist() == [[float(SIZE) ** 2 + 1]] * 2
    assert before.tolist() == [1.0, 1.0]
    torch.tpu.synchronize()
    assert all(work is not None and work.is_completed() for work in works)


def case_calls_of_two_threads() -> None:
    x = torch.ones(2, device=DEVICE, requires_grad=True)

    class Summed(torch.autograd.Function):  # its backward runs on a thread of autograd's
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            grad = grads[0].clone()
            dist.all_reduce(grad, async_op=True)
            return grad

    y = torch.full((2,), 1.0 + RANK, device=DEVICE)
    dist.all_reduce(y, async_op=True)
    (Summed.apply(x) * y).sum().backward()
    dist.all_reduce(y)
    total = SIZE * (SIZE + 1) / 2
    assert x.grad is not None
    assert x.grad.tolist() == [SIZE * total] * 2
    assert y.tolist() == [SIZE * total] * 2


def case_coalesced() -> None:
    xs = [torch.ones(2, device=DEVICE), torch.ones(3, 1, device=DEVICE)]
    dist.all_reduce_coalesced(xs)
    assert [x.tolist() for x in xs] == [[SIZE] * 2, [[SIZE]] * 3]
    a, b = torch.ones(2, device=DEVICE), torch.ones(2, device=DEVICE)
    out = torch.zeros(2 * SIZE, device=DEVICE)
    with dist._coalescing_manager(device=DEVICE, async_ops=True) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    with dist._coalescing_manager(device=DEVICE):
        dist.all_gather_into_tensor(out, a)
    assert a.tolist() == b.tolist() == [SIZE] * 2
    assert out.tolist() == [SIZE] * (2 * SIZE)


def case_large_in_host_memory() -> None:
    """What is reduced where it lies: others that read the memory still see the old values."""
    n = 70_001
    for op, dtype, expected in (
        (ReduceOp.SUM, torch.float32, SIZE * (SIZE + 1) / 2),
        (ReduceOp.SUM, torch.int8, SIZE * (SIZE + 1) / 2),
        (ReduceOp.MAX, torch.float64, SIZE),
        (ReduceOp.MIN, torch.int64, 1),
        (ReduceOp.PRODUCT, torch.float16, math.factorial(SIZE)),
        (ReduceOp.AVG, torch.float32, (SIZE + 1) / 2),
        (ReduceOp.AVG, torch.int32, (SIZE * (SIZE + 1) // 2) // SIZE),
        (ReduceOp.SUM, torch.bfloat16, SIZE * (SIZE + 1) / 2),
        (dist._make_nccl_premul_sum(0.5), torch.float32, SIZE * (SIZE + 1) / 4),
    ):
        x = torch.full((n,), 1 + RANK, dtype=dtype, device=DEVICE)
        sums = [(x[i:] * 2).sum() for i in range(3)]  # these programs may not have run yet
        same_value = x.clone()
        dist.all_reduce(x, op, async_op=True)
        assert x.unique().tolist() == [expected], (op, dtype)
        dist.all_reduce(x, ReduceOp.MAX)  # now nobody else has the memory
        assert x.unique().tolist() == [expected], (op, dtype)
        assert same_value.unique().tolist() == [1 + RANK]
        if dtype == torch.float32:
            assert [s.item() for s in sums] == [2.0 * (1 + RANK) * (n - i) for i in range(3)]
    x = torch.full((n,), 1.0 + RANK, device=DEVICE)
    array = tpu_core.to_jax(x)
    dist.all_reduce(x)
    assert float(array.max()) == 1.0 + RANK
    assert x.unique().tolist() == [SIZE * (SIZE + 1) / 2]


def case_empty_and_large() -> None:
    x = torch.zeros(0, 3, device=DEVICE)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    y = torch.full((300_000,), 1.0 + RANK, device=DEVICE)
    dist.all_reduce(y)
    assert y.unique().tolist() == [SIZE * (SIZE + 1) / 2]


def case_objects() -> None:
    everyone = [None] * SIZE
    dist.all_gather_object(everyone, {"rank": RANK})
    assert everyone == [{"rank": r} for r in range(SIZE)]
    objects = [f"of {RANK}"]
    dist.broadcast_object_list(objects, 1)
    assert objects == ["of 1"]
    scattered: list[object] = [None]
    dist.scatter_object_list(scattered, [10 * r for r in range(SIZE)], src=0)
    assert scattered == [10 * RANK]


def case_subgroups() -> None:
    alone = [dist.new_group([r]) for r in range(SIZE)]
    x = torch.full((2,), 5.0, device=DEVICE)
    dist.all_reduce(x, group=alone[RANK])
    assert x.tolist() == [5.0, 5.0]
    again = dist.new_group(list(range(SIZE)))
    dist.all_reduce(x, group=again)
    assert x.tolist() == [5.0 * SIZE] * 2
    if SIZE == 4:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        crossed = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        for _ in range(1 + RANK // 2):  # each pair its own number of times and shapes
            y = torch.full((2 + RANK // 2,), 1.0 + RANK, device=DEVICE)
            dist.all_reduce(y, group=pairs[RANK // 2])
        assert y.unique().tolist() == [[3.0], [7.0]][RANK // 2]
        z = torch.full((3,), 1.0 + RANK, device=DEVICE)
        dist.broadcast(z, RANK % 2 + 2, group=crossed[RANK % 2])
        assert z.tolist() == [3.0 + RANK % 2] * 3


def case_groups_made_by_some_ranks() -> None:
    if RANK == 0:  # the others know nothing of it
        own = dist.new_group([0], use_local_synchronization=True)
        x = torch.full((2,), 5.0, device=DEVICE)
        dist.all_reduce(x, group=own)
        assert x.tolist() == [5.0, 5.0]
    members = list(range(1, min(SIZE, 3)))
    if RANK in members:
        group = dist.new_group(members, use_local_synchronization=True)
        y = torch.full((3,), 1.0 + RANK, device=DEVICE)
        dist.all_reduce(y, group=group)
        assert y.tolist() == [sum(1.0 + r for r in members)] * 3
    z = torch.ones(2, device=DEVICE)
    dist.all_reduce(z)
    assert z.tolist() == [SIZE] * 2


def case_ranks_differ() -> None:
    if RANK == 0:  # logs and evaluates by itself
        x = torch.randn(7, 7, device=DEVICE)
        assert (x @ x.t()).trace().item() > 0
    y = torch.ones(2 + RANK, device=DEVICE).sum().view(1)
    dist.all_reduce(y)
    assert y.item() == sum(2 + r for r in range(SIZE))
    before = torch.tpu.metrics()["compiles"] + torch.tpu.metrics()["cache_hits_disk"]
    for _ in range(5):
        dist.all_reduce(y)
        if RANK == 0:
            y.item()
    after = torch.tpu.metrics()["compiles"] + torch.tpu.metrics()["cache_hits_disk"]
    assert after == before


def case_functional() -> None:
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    x = torch.full((2, 2), 1.0 + RANK, device=DEVICE)
    total = SIZE * (SIZE + 1) / 2
    assert (funcol.all_reduce(x, "sum", group) + 1).tolist() == [[total + 1] * 2] * 2
    gathered = funcol.all_gather_tensor(x, 0, group)
    assert gathered[:, 0].tolist() == [1.0 + r for r in range(SIZE) for _ in range(2)]
    wide = torch.ones(2, 2 * SIZE, device=DEVICE)
    assert funcol.reduce_scatter_tensor(wide, "sum", 1, group).tolist() == [[SIZE] * 2] * 2
    sizes = [1] * SIZE
    y = torch.arange(1.0 * SIZE, device=DEVICE) + 10 * RANK
    assert funcol.all_to_all_single(y, sizes, sizes, group).tolist() == [
        10.0 * r + RANK for r in range(SIZE)
    ]


def case_again() -> None:
    port = [spawn.free_port() if RANK == 0 else None]
    dist.broadcast_object_list(port, 0)
    dist.barrier()
    dist.destroy_process_group()
    x = torch.full((2,), 1.0 + RANK, device=DEVICE)
    # On the old port a rank that is early meets the store of the group before.
    os.environ["MASTER_PORT"] = str(port[0])
    dist.init_process_group("tpu_dist", device_id=DEVICE)
    dist.all_reduce(x)
    assert x.tolist() == [SIZE * (SIZE + 1) / 2] * 2
    dist.all_reduce(x, async_op=True)  # on its way when the group ends
    dist.destroy_process_group()
    assert x.tolist() == [SIZE * SIZE * (SIZE + 1) / 2] * 2
