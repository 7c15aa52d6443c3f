"""The processes of the default group become one PJRT world."""

from __future__ import annotations

import os
import uuid
from typing import Any

import torch

from tpu_core.extend import World
from tpu_distributed import addresses, job_secret
from tpu_distributed.launch import environment


def enter(store: Any, rank: int, size: int, timeout: float) -> None:
    """Enter the world of a default group, unless all its processes are in it from before.

    Args:
        store: Store of the group.
        rank: Of this process.
        size: Number of processes.
        timeout: Seconds to wait for the others.
    """
    if size == 1:
        return
    if _is_current(store, rank, size):
        return
    if not torch.get_device_module("tpu").is_initialized():
        environment.settle_process(os.environ)
    key = "world"
    secret = job_secret.of_group(store, rank, timeout)
    listening = addresses.interface(size)
    if rank == 0:
        name = uuid.uuid4().hex
        port = World.start_coordinator(name, size, listening, secret)
        store.set(key, f"{name} {addresses.reached_at(listening)} {port}")
    name, host, text = store.get(key).decode().split()
    World(name, rank, size).join((host, int(text)), secret, listening, timeout)


def _is_current(store: Any, rank: int, size: int) -> bool:
    """Return whether each process is in the same world already, under the same rank."""
    world = World.current()
    fits = world is not None and (world.rank, world.size) == (rank, size)
    store.set(f"in/{rank}", world.name if world is not None and fits else "")
    names = {store.get(f"in/{r}") for r in range(size)}
    return len(names) == 1 and names != {b""}
