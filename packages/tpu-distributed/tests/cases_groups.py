"""Default groups that are made anew, and groups that are split."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("tpu", RANK)


STORES: list[dist.Store] = []  # the first group's, which outlives it


def case_start() -> None:
    dist.init_process_group()
    STORES.append(dist.distributed_c10d._get_default_store())


def init_again(number: int, **more: Any) -> None:
    """A default group with keys of its own. A further port may be taken by any process."""
    store = dist.PrefixStore(f"again/{number}", STORES[0])
    dist.init_process_group(store=store, rank=RANK, world_size=SIZE, **more)


def case_again() -> None:
    dist.barrier()
    dist.destroy_process_group()
    x = torch.full((2,), 1.0 + RANK, device=DEVICE)
    init_again(5, backend="tpu_dist", device_id=DEVICE)
    dist.all_reduce(x)
    assert x.tolist() == [SIZE * (SIZE + 1) / 2] * 2
    dist.barrier()
    dist.destroy_process_group()


def case_initialised_many_times() -> None:
    x = torch.ones(2, device=DEVICE)
    for times in range(1, 4):
        init_again(times)
        group = dist.new_group(list(range(SIZE)))
        dist.all_reduce(x)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [float(SIZE) ** (2 * times)] * 2
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()


def case_split_group() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        return  # torch 2.11 asks for the group's backend of CUDA
    # In PyTorch a default group that is bound to a device can be split.
    init_again(4, device_id=DEVICE)
    half = SIZE // 2
    mine = list(range(half)) if RANK < half else list(range(half, SIZE))
    group = dist.split_group(split_ranks=[list(range(half)), list(range(half, SIZE))])
    assert dist.get_process_group_ranks(group) == mine
    assert dist.get_rank(group) == RANK - mine[0]
    for _ in range(1 + RANK // half):  # each its own number of times
        x = torch.full((3,), 1.0 + RANK, device=DEVICE)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [sum(1.0 + r for r in mine)] * 3
    y = torch.full((2,), 1.0 + RANK)
    dist.all_reduce(y, group=group)  # on the CPU
    assert y.tolist() == [sum(1.0 + r for r in mine)] * 2
    mesh = init_device_mesh("tpu", (2, half), mesh_dim_names=("outer", "inner"))  # splits, too
    for axis in ("outer", "inner"):
        x = torch.full((3,), 1.0 + RANK, device=DEVICE)
        members = dist.get_process_group_ranks(mesh.get_group(axis))
        dist.all_reduce(x, group=mesh.get_group(axis))
        assert x.tolist() == [sum(1.0 + r for r in members)] * 3
    everyone = dist.split_group(split_ranks=[list(range(SIZE))], timeout=timedelta(seconds=60))
    again = dist.split_group(everyone, split_ranks=[list(range(SIZE))])
    z = torch.ones(2, device=DEVICE)
    dist.all_reduce(z, group=again)
    assert z.tolist() == [SIZE] * 2
    # Last: PyTorch names later groups by how many a rank has, so that names differ from here on.
    first = dist.split_group(split_ranks=[[0]])
    assert (first in (None, dist.GroupMember.NON_GROUP_MEMBER)) == (RANK > 0)  # as of torch 2.15
    dist.barrier()  # rank 0 has the store that the others are still reading
