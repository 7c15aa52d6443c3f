"""Ranks in the order of the torus."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpu_core.errors import MeshError
from tpu_distributed.torus import order_of


def chips(side: int) -> list[Any]:
    """Those of a v5e slice by rank: each host has a block of 2 x 2."""
    places = [
        (x + dx, y + dy, 0)
        for y in range(0, side, 2)
        for x in range(0, side, 2)
        for dy in (0, 1)
        for dx in (0, 1)
    ]
    return [
        SimpleNamespace(
            id=y * side + x,
            coords=(x, y, z),
            core_on_chip=0,
            platform="tpu",
            device_kind="TPU v5 lite",
            process_index=i // 4,
            slice_index=0,
        )
        for i, (x, y, z) in enumerate(places)
    ]


def hops(ranks: torch.Tensor, devices: list[Any], side: int) -> list[int]:
    """Links between neighbours along the last axis of a mesh, the ends joined."""
    found = []
    for row in ranks.reshape(-1, ranks.shape[-1]).tolist():
        for a, b in zip(row, [*row[1:], row[0]]):
            ways = [abs(p - q) for p, q in zip(devices[a].coords, devices[b].coords)]
            found.append(sum(min(w, side - w) for w in ways))
    return found


@pytest.mark.parametrize("sizes", [(4, 4), (1, 16), (2, 8)])
def test_neighbours_in_the_mesh_are_neighbours_in_the_torus(sizes: tuple[int, ...]) -> None:
    devices = chips(4)
    order = order_of(devices, sizes)
    assert sorted(order.flatten().tolist()) == list(range(16))
    counted = hops(torch.arange(16).reshape(sizes), devices, 4)
    ours = hops(order, devices, 4)
    assert sum(ours) < sum(counted)
    if sizes == (4, 4):
        assert set(ours) == {1}


def test_devices_without_a_torus_are_counted() -> None:
    devices = [SimpleNamespace(id=i) for i in range(6)]
    assert torch.equal(order_of(devices, (2, 3)), torch.arange(6).reshape(2, 3))
    with pytest.raises(MeshError, match="The mesh has 4 devices, and there are 6 ranks"):
        order_of(devices, (2, 2))
