"""Topologies, meshes, and how parameters are divided over them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import Replicate, Shard

from tpu_compile.aot.chips import parse_topology
from tpu_compile.aot.sharding import batch_spec, check_mesh, fsdp, shard_shape, spec_of
from tpu_core.errors import MeshError, UnknownTopologyError

MESH = {"data": 4, "model": 2}


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("v5e:2x2", 4),
        ("V5P:4x4x4", 64),
        ("tpu7x:16x16x16", 8192),
        ("v5litepod:2x4", 8),
        ("v3:2x2", 8),
    ],
)
def test_a_topology_has_devices(name: str, devices: int) -> None:
    assert parse_topology(name).devices == devices


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("v7x:2x2x1", "Did you mean"),
        ("v5e-8", "there is no generation 'v5e-8'"),
        ("v5p:4x4", "a torus of 3 dimensions"),
        ("v5e", "a torus of 2 dimensions"),
        ("v5e:0x2", "a torus of 2 dimensions"),
        ("h100:8", "generations: v2, v3"),
    ],
)
def test_an_unknown_topology_is_named_with_what_there_is(name: str, told: str) -> None:
    with pytest.raises(UnknownTopologyError, match=re.escape(told)):
        parse_topology(name)


def test_a_mesh_has_as_many_devices_as_its_topology() -> None:
    chips = parse_topology("tpu7x:2x2x1")
    assert check_mesh(None, chips) == {"data": 8}
    assert check_mesh(MESH, chips) == MESH
    with pytest.raises(MeshError, match=r"The mesh has 4 devices, and tpu7x:2x2x1 has 8 \(4 chips"):
        check_mesh({"data": 4}, chips)


@pytest.mark.parametrize(
    ("rules", "spec"),
    [
        (None, ()),
        ({"*.up.weight": ("model", None)}, ("model", None)),
        ({re.compile(r"blocks\.\d+\.up\..*"): (None, "model")}, (None, "model")),
        ({"other": ("model",), "*": (("data", "model"),)}, (("data", "model"),)),
        ({"*": {"data": Shard(0), "model": Replicate()}}, ("data", None)),
        ({"*": {"data": Shard(1), "model": Shard(1)}}, (None, ("data", "model"))),
        (fsdp("data"), (None, "data")),
        (fsdp("data", {"*.up.*": (None, "model")}), ("data", "model")),
        (lambda name, shape, mesh: ("model",) if shape[0] == 8 else None, ("model",)),
    ],
)
def test_rules_give_a_parameter_its_spec(rules: Any, spec: Any) -> None:
    assert spec_of("blocks.0.up.weight", torch.empty(8, 16), rules, MESH) == spec


def test_placements_of_dtensors_are_their_rules() -> None:
    class Placed(torch.Tensor):
        placements = (Shard(0), Shard(1))

        class device_mesh:
            mesh_dim_names = ("data", "model")

    tensor = torch.empty(8, 16).as_subclass(Placed)
    assert spec_of("w", tensor, {"*": (None, "data")}, MESH) == ("data", "model")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (("tensor",), "'tensor' is not an axis of the mesh"),
        (("data", "data"), "'data' is used twice"),
        (("data", None, None), "has 3 items, and it has 2 dimensions"),
        ((None, "data"), "Dimension 1 of 'w' has 6 elements, which 4 devices do not divide"),
    ],
)
def test_a_spec_that_does_not_fit_is_an_error(spec: Any, told: str) -> None:
    with pytest.raises(MeshError, match=re.escape(told)):
        spec_of("w", torch.empty(8, 6), {"w": spec}, MESH)


def test_batches_are_divided_over_the_data_axes() -> None:
    assert batch_spec("auto", MESH) == ("data",)
    assert batch_spec("auto", {"dp": 2, "fsdp": 2, "tp": 2}) == (("dp", "fsdp"),)
    assert batch_spec("auto", {"model": 8}) == ()
    assert batch_spec("model", MESH) == ("model",)
    assert batch_spec((None, "data"), MESH) == (None, "data")
    assert batch_spec(None, MESH) == ()


def test_a_part_is_the_shape_over_its_axes() -> None:
    assert shard_shape((8, 6, 4), (("data", "model"), None), MESH) == (1, 6, 4)


def test_fsdp_leaves_alone_what_it_cannot_divide() -> None:
    assert spec_of("w", nn.Parameter(torch.empty(7)), fsdp("data"), MESH) == (None,)


def test_fsdp_over_an_axis_that_the_mesh_lacks() -> None:
    with pytest.raises(MeshError, match="over 'data', which is not an axis of the mesh") as raised:
        spec_of("w", torch.empty(8, 16), fsdp(), {"fsdp": 4, "model": 2})
    assert "Name one of its axes, fsdp, model" in str(raised.value)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_placement_of_a_dimension_that_the_tensor_lacks(dim: int) -> None:
    told = rf"'w' has the placement .*{dim}.* over 'data', and it has 2 dimensions"
    with pytest.raises(MeshError, match=told):
        spec_of("w", torch.empty(8, 16), {"w": {"data": Shard(dim)}}, MESH)
