"""Sub-groups whose programs span all devices, as on slices where libtpu refuses others."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tpu_core.errors import CollectiveMismatchError

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("tpu", RANK)
groups: dict[str, tuple[Any, list[int]]] = {}


def case_start() -> None:
    dist.init_process_group()
    mesh = init_device_mesh("tpu", (2, SIZE // 2), mesh_dim_names=("rows", "columns"))
    for name in ("rows", "columns"):
        group = mesh[name].get_group()
        groups[name] = group, dist.get_process_group_ranks(group)


def value_of(rank: int) -> torch.Tensor:
    return torch.arange(4.0) * 10 + rank


def case_collectives_of_rows_and_columns() -> None:
    for group, ranks in groups.values():
        x = value_of(RANK).to(DEVICE)
        values = [value_of(r) for r in ranks]
        dist.all_reduce(x, group=group)
        assert torch.equal(x.cpu(), sum(values))
        for root in range(len(ranks)):
            y = value_of(RANK).to(DEVICE)
            dist.broadcast(y, group_src=root, group=group)
            assert torch.equal(y.cpu(), values[root])
        gathered = torch.empty(4 * len(ranks), device=DEVICE)
        dist.all_gather_into_tensor(gathered, value_of(RANK).to(DEVICE), group=group)
        assert torch.equal(gathered.cpu(), torch.cat(values))
        part = torch.empty(4 // len(ranks), device=DEVICE)
        dist.reduce_scatter_tensor(part, value_of(RANK).to(DEVICE), group=group)
        mine = dist.get_rank(group)
        assert torch.equal(part.cpu(), sum(values).chunk(len(ranks))[mine])
        swapped = torch.empty(4, device=DEVICE)
        dist.all_to_all_single(swapped, value_of(RANK).to(DEVICE), group=group)
        parts = [v.chunk(len(ranks))[mine] for v in values]
        assert torch.equal(swapped.cpu(), torch.cat(parts))


def case_groups_in_another_order() -> None:
    halves = [[3, 0], [1, 2]]
    (mine,) = (h for h in halves if RANK in h)
    made = [dist.new_group(half) for half in halves]
    group = made[halves.index(mine)]
    gathered = torch.empty(2 * SIZE, device=DEVICE)
    dist.all_gather_into_tensor(gathered, value_of(RANK).to(DEVICE), group=group)
    order = dist.get_process_group_ranks(group)
    assert torch.equal(gathered.cpu(), torch.cat([value_of(r) for r in order]))


def case_uneven_parts() -> None:
    group, ranks = groups["columns"]
    mine = dist.get_rank(group)
    outputs = [torch.empty(1 + i, device=DEVICE) for i in range(len(ranks))]
    dist.all_gather(outputs, torch.full((1 + mine,), float(RANK), device=DEVICE), group=group)
    assert [o.tolist() for o in outputs] == [[float(r)] * (1 + i) for i, r in enumerate(ranks)]


def case_messages_and_barriers_are_of_the_group_alone() -> None:
    group, ranks = groups["columns"]
    if RANK not in (0, 1):
        return
    dist.barrier(group)
    x = value_of(RANK).to(DEVICE)
    if RANK == ranks[0]:
        dist.send(x, group_dst=1, group=group)
    else:
        dist.recv(x, group_src=0, group=group)
    assert torch.equal(x.cpu(), value_of(ranks[0]))


def case_groups_that_call_different_things() -> None:
    group, _ = groups["columns"]
    x = torch.ones(4 + RANK // 2, device=DEVICE)
    with pytest.raises(CollectiveMismatchError, match="in groups of 2"):
        dist.all_reduce(x, group=group)
    assert x.tolist() == [1.0] * len(x)


def case_a_rank_alone_needs_nobody() -> None:
    made = [dist.new_group([rank]) for rank in range(SIZE)]
    if RANK == 3:
        x = value_of(RANK).to(DEVICE)
        dist.all_reduce(x, group=made[3])
        assert torch.equal(x.cpu(), value_of(RANK))


def case_ranks_that_do_something_else() -> None:
    # They would not enter the program: an error on all, not a wait for ever.
    group, _ = groups["columns"]
    x = torch.ones(2, device=DEVICE)
    with pytest.raises(CollectiveMismatchError, match="in groups of 2"):
        dist.all_reduce(x, group=group if RANK < 2 else None)
    assert x.tolist() == [1.0, 1.0]


def case_end() -> None:
    dist.barrier()  # rank 0 has the store that the others may be reading
    dist.destroy_process_group()
