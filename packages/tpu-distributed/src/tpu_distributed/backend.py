"""Factory of the c10d backend: the world first, then one group of it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tpu_core.extend import World, runtime
from tpu_distributed import slices, world
from tpu_distributed._C import make_backend
from tpu_distributed.flight_records.recorder import RECORDER
from tpu_distributed.group import Group
from tpu_distributed.rendezvous import Rendezvous


def create(options: Any) -> Any:
    """A backend for the processes of a group.

    Args:
        options: c10d's description of the group: store, rank, size, timeout, ranks.

    Raises:
        ProcessGroupError: The device was used before and cannot join a world any more.
    """
    rank, size = options.group_rank, options.group_size
    # A store may outlive the groups in it (that of torchrun does): each group needs keys of its
    # own, and all its processes count alike.
    times = options.store.add(f"made by {rank}", 1)
    store = dist.PrefixStore(f"{times}/", options.store)
    ranks = list(options.global_ranks_in_group)
    if not ranks:  # the default group
        world.enter(store, rank, size, options.timeout.total_seconds())
        ranks = list(range(size))
        current = World.current() if size > 1 else None
        RECORDER.start(current.name if current else None, rank, size)
    client = runtime().client
    devices = client.members()
    members = [devices[r] for r in ranks] if size > 1 else [client.devices[0]]
    seconds = options.timeout.total_seconds()
    control = Rendezvous(store, options.group_id, rank, size, seconds, ranks)
    if not options.global_ranks_in_group:
        slices.entered(control, members)
    group = Group(control, members, slices.whole_of(ranks, rank))
    return make_backend(rank, size, "tpu", seconds, group)
