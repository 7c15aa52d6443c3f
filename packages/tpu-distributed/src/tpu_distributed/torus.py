"""Ranks in the order of the torus that links their chips."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tpu_core.errors import MeshError
from tpu_core.extend import runtime


def torus_order(sizes: Sequence[int]) -> torch.Tensor:
    """All ranks as a mesh whose axes lie along the links between chips.

    `init_device_mesh` counts ranks up, host by host. A host has a block of chips, so that ranks
    that follow each other are not always neighbours. The programs are the same in any order; how
    far their collectives have to go is not.

    Args:
        sizes: Of the mesh, the axis that communicates most last; they multiply to the number of
            ranks.

    Returns:
        Ranks, int64 of shape ``sizes``, on the CPU; counted up where chips have no torus.

    Raises:
        MeshError: The sizes do not multiply to the number of ranks.

    Example:
        >>> ranks = tpu_distributed.torus_order((16, 16))
        >>> mesh = DeviceMesh("tpu", ranks, mesh_dim_names=("data", "model"))
    """
    return order_of(runtime().client.members(), sizes)


def order_of(devices: Sequence[Any], sizes: Sequence[int]) -> torch.Tensor:
    """As `torus_order`, of JAX devices by rank."""
    if math.prod(sizes) != len(devices):
        raise MeshError(
            f"The mesh has {math.prod(sizes)} devices, and there are {len(devices)} ranks.",
            values={"sizes": tuple(sizes)},
        )
    ranks = torch.arange(len(devices), device="cpu")
    if all(getattr(device, "coords", None) is not None for device in devices):
        from tpu_core.extend import LibtpuTopology  # jax's meshes take long to import

        rank = {device.id: i for i, device in enumerate(devices)}
        placed: list[Any] = LibtpuTopology.ordered(devices, tuple(sizes)).ravel().tolist()
        ranks = torch.tensor([rank[device.id] for device in placed], device="cpu")
    return ranks.reshape(tuple(sizes))
