"""Models that PyTorch's parallelisms were applied to: no process group runs."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import tpu_compile
from test_aot_values import on_meta, run, values_of
from tpu_compile.aot.annotations import in_halves
from tpu_compile.aot.capture import AotJob
from tpu_compile.aot.costs import analyse
from tpu_compile.aot.hlo import parse
from tpu_compile.aot.layers import capture_scanned
from tpu_compile.aot.parallelism import mesh_of
from tpu_compile.aot.sharding import spec_of
from tpu_compile.layers import LAYERS
from tpu_compile.sharding_constraints import over
from tpu_core import lowering, runtime
from tpu_core.errors import MeshError
from tpu_core.pjrt.chips import AbstractChip

MESH = {"data": 2, "model": 4}


@pytest.fixture(autouse=True, scope="module")
def started() -> None:
    runtime.runtime()
    lowering.load()


@contextmanager
def ranks(number: int) -> Iterator[None]:
    """One process of many, which are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers: int = 2, dim: int = 32) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(x)))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()


def sharded(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def sequence_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return parallelize_module(model, mesh, {"norm": whole})


APPLIED: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "fully_shard": lambda model, mesh: sharded(model, mesh["data"]),
    "tensor parallel": lambda model, mesh: tensor_parallel(model, mesh["model"]),
    "sequence parallel": lambda model, mesh: sequence_parallel(model, mesh["model"]),
    "both": lambda model, mesh: sharded(tensor_parallel(model, mesh["model"]), mesh["data"]),
}


def mesh_2d() -> Any:
    return init_device_mesh("tpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))


@pytest.mark.parametrize(
    ("name", "scan"),
    [
        ("fully_shard", True),
        ("tensor parallel", False),
        ("sequence parallel", True),
        ("both", False),
    ],
)
def test_the_program_computes_what_the_model_does(name: str, scan: bool) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 8, 32)
    twin, batch = on_meta(model, (x,))
    with ranks(8):
        twin = APPLIED[name](twin, mesh_2d())
        hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in twin.modules()]
        captured, _, _ = capture_scanned(AotJob(twin, batch, {}, MESH, loss="loss"), scan, False)
        assert hooks == [
            (dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in twin.modules()
        ]
        assert all(p.device.type == "meta" for p in twin.parameters())
    assert DTensor.from_local is not None and not hasattr(x, "redistribute")
    made = run(captured, values_of(captured, model, (x,)))
    loss = model.loss(x)
    grads = dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(loss, [*model.parameters()]))
    )
    np.testing.assert_allclose(made["loss"], loss.detach(), rtol=1e-5)
    for output, value in made.items():
        leaf = output.removeprefix("gradient of ")
        if leaf == output:
            continue
        before, star, after = leaf.partition("*")
        members = [g for n, g in grads.items() if n.startswith(before) and n.endswith(after)]
        expected = torch.stack(members) if star else grads[leaf]
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)


def test_mixed_precision_is_that_of_fully_shard() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 8, 32)
    twin, batch = on_meta(model, (x,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    with ranks(2):
        mesh = init_device_mesh("tpu", (2,), mesh_dim_names=("data",))
        twin = sharded(twin, mesh, mp_policy=policy)
        captured, _, _ = capture_scanned(AotJob(twin, batch, {}, {"data": 2}), False, False)
    made = run(captured, values_of(captured, model, (x,)))["output.0"]
    assert made.dtype == np.float32
    expected = copy.deepcopy(model).to(torch.bfloat16)(x.to(torch.bfloat16)).float().detach()
    np.testing.assert_allclose(made, expected, atol=0.02)


def test_the_mesh_is_that_of_the_parameters() -> None:
    assert mesh_of(Net()) is None
    with ranks(8), torch.device("meta"):
        whole = mesh_2d()
        assert mesh_of(tensor_parallel(Net(), whole["model"])) == MESH
        assert mesh_of(fully_shard(Net(), mesh=init_device_mesh("tpu", (8,)))) == {"data": 8}
        with pytest.raises(MeshError, match="have no names"):
            mesh_of(tensor_parallel(Net(), init_device_mesh("tpu", (8,))))
        other = init_device_mesh("tpu", (8,), mesh_dim_names=("model",))
        several = tensor_parallel(Net(), whole["model"])
        several.head = parallelize_module(nn.Linear(32, 8), other, ColwiseParallel())
        with pytest.raises(MeshError, match="several meshes"):
            mesh_of(several)


def test_placements_become_specs() -> None:
    with ranks(8), torch.device("meta"):
        net = sharded(tensor_parallel(Net(dim=32), mesh_2d()["model"]), mesh_2d()["data"])
        specs = {n: spec_of(n, p, None, MESH) for n, p in net.named_parameters()}
    # Columns are divided first; `fully_shard` divides what is left to each device.
    assert specs["blocks.0.up.weight"] == (("model", "data"), None)
    assert specs["blocks.0.down.weight"] == ("data", "model")
    assert specs["blocks.0.norm.weight"] == ("data",)


def test_what_an_axis_does_not_divide_is_divided_elsewhere_or_whole() -> None:
    with ranks(16), torch.device("meta"):
        mesh = init_device_mesh("tpu", (16,), mesh_dim_names=("data",))
        net = fully_shard(nn.Linear(32, 24), mesh=mesh)
        specs = {n: spec_of(n, p, None, {"data": 16}) for n, p in net.named_parameters()}
    assert specs == {"weight": (None, "data"), "bias": (None,)}


def test_a_partial_activation_is_an_error() -> None:
    class Partly(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(x, self.mesh, [Partial()]).to_local()

    with ranks(8):
        model = Partly()
        model.mesh = init_device_mesh("tpu", (8,), mesh_dim_names=("data",))
        with pytest.raises(MeshError, match=re.escape("has the placement P(sum) over 'data'")):
            tpu_compile.aot(model, (torch.empty(8, 8, device="meta"),), topology="v5e:2x4")


def collectives(plan: Any) -> dict[tuple[str, int], tuple[int, int]]:
    """Count and bytes by kind and group."""
    return {(c.kind, c.group): (c.count, c.bytes) for c in plan.cost.collectives if c.bytes > 4096}


def planned(model: nn.Module, rows: int, topology: str) -> Any:
    return tpu_compile.aot(
        model,
        (torch.empty(rows, 64, 256, device="meta"),),
        topology=topology,
        loss="loss",
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        scan=False,
    )


@pytest.mark.slow
def test_ddp_sums_gradients() -> None:
    model = Net(1, 256)
    size = sum(p.numel() for p in model.parameters()) * 4
    with ranks(4):
        plan = planned(nn.parallel.DistributedDataParallel(model), 8, "v5e:2x2")
    ((_, found),) = collectives(plan).items()
    assert size <= found[1] < 1.01 * size


@pytest.mark.parametrize(("again", "times"), [(True, 2), (False, 1)])
def test_fully_shard_gathers_parameters_and_scatters_gradients(again: bool, times: int) -> None:
    with torch.device("meta"):
        model = Net(1, 256)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1) * 4
    with ranks(4):
        mesh = init_device_mesh("tpu", (4,))
        plan = planned(sharded(model, mesh, reshard_after_forward=again), 8, "v5e:2x2")
    assert plan.mesh == {"data": 4}
    found = collectives(plan)
    # With `reshard_after_forward` once for each pass.
    assert 0.9 * matrices < found["all-gather", 4][1] / times < 1.1 * matrices
    assert 0.9 * matrices < found["reduce-scatter", 4][1] * 4 < 1.1 * matrices
    # Vectors of a few elements are summed whole.
    assert found.get(("all-reduce", 4), (0, 0))[1] < 0.05 * matrices


def gathered_again(again: bool | None) -> int:
    """Number of matrices that a program gathers behind a gradient."""
    with ranks(8), torch.device("meta"):
        options = {} if again is None else {"reshard_after_forward": again}
        model = sharded(Net(), mesh_2d()["data"], **options)
        job = AotJob(model, (torch.empty(4, 8, 32),), {}, MESH, loss="loss")
        captured, _, _ = capture_scanned(job, False, False)
    behind = (n for n in captured.graph.graph.nodes if "tpu_compile.behind" in str(n.target))
    return sum(n.args[0].meta["val"].dim() == 2 for n in behind)


@pytest.mark.parametrize(("remat", "times"), [(False, 1), (True, 0)])
def test_a_scanned_layer_that_runs_again_gathers_once_for_that(remat: bool, times: int) -> None:
    with ranks(8), torch.device("meta"):
        model = sharded(Net(), mesh_2d()["data"])
        job = AotJob(model, (torch.empty(4, 8, 32),), {}, MESH, loss="loss")
        captured, _, _ = capture_scanned(job, True, remat)
    (call,) = (n for n in captured.graph.graph.nodes if "layers_backward" in str(n.target))
    nodes = list(LAYERS[call.args[-2]].backward.graph.nodes)
    behind = [n for n in nodes if "tpu_compile.behind" in str(n.target)]
    assert len([n for n in behind if n.args[0].meta["val"].dim() == 2]) == 2 * times


def test_what_is_resharded_after_the_forward_pass_is_gathered_again() -> None:
    assert gathered_again(False) == 0
    # The root keeps its parameters unless it is told not to: the head is used again at once.
    assert gathered_again(None) == 4
    assert gathered_again(True) == 5


@pytest.mark.slow
def test_tensor_parallel_sums_activations_twice_a_block() -> None:
    with torch.device("meta"):
        model = Net(1, 256)
    activation = 4 * 64 * 256 * 4
    with ranks(8):
        plan = planned(tensor_parallel(model, mesh_2d()["model"]), 8, "v5e:2x4")
    assert plan.mesh == MESH
    # Forward behind the second product, backward behind the first.
    assert collectives(plan)["all-reduce", 4] == (2, 2 * activation)


def test_sequence_parallel_gathers_and_scatters_instead() -> None:
    with torch.device("meta"):
        model = Net(1, 256)
    activation = 4 * 64 * 256 * 4
    with ranks(8):
        plan = planned(sequence_parallel(model, mesh_2d()["model"]), 8, "v5e:2x4")
    found = collectives(plan)
    assert found["reduce-scatter", 4] == (2, 2 * activation // 4)
    # One a product, and the result of all blocks.
    assert found["all-gather", 4][1] == 3 * activation
    assert ("all-reduce", 4) not in found


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32])
def test_inputs_that_come_in_halves_keep_their_values(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = np.iinfo(dtype)
    values = np.array([0, 1, limits.min, limits.max, limits.max // 3, limits.min // 5], dtype)
    divided = []

    def constrained(x: Any, spec: Any) -> Any:
        divided.append(x.dtype)
        return x

    monkeypatch.setattr(sys.modules[in_halves.__module__], "constrain", constrained)
    with jax.enable_x64(True), over(AbstractChip().mesh({"data": 2})):
        made = in_halves(jax.numpy.asarray(values), ("data",))
    assert made.dtype == dtype
    np.testing.assert_array_equal(made, values)
    # libtpu aborts over slices of 64 bits on tpu7x.
    assert divided == ([] if dtype is np.int32 else [np.uint32, np.uint32])


def test_a_collective_that_runs_beside_others_is_counted_once() -> None:
    line = (
        "= f32[8,128]{1,0} all-gather(%p), channel_id=7, "
        'replica_groups=[1,4]<=[4], dimensions={0}, frontend_attributes={chain_id="0"}'
    )
    parts = "".join(
        f"%part.{i} (p: f32[2,128]) -> f32[8,128] {{\n  %p = f32[2,128]{{1,0}} parameter(0)\n"
        f"  ROOT %g.{i} {line}\n}}\n\n"
        for i in range(3)
    )
    calls = "".join(
        f"  %f.{i} = f32[8,128]{{1,0}} fusion(%x), kind=kLoop, calls=%part.{i}\n" for i in range(3)
    )
    text = (
        f"{parts}ENTRY %main (x: f32[2,128]) -> f32[8,128] {{\n"
        f"  %x = f32[2,128]{{1,0}} parameter(0)\n{calls}"
        "  ROOT %r = f32[8,128]{1,0} copy(%f.2)\n}\n"
    )
    (found,) = analyse(parse(text), {}).collectives
    assert (found.count, found.bytes, found.group) == (1, 8 * 128 * 4, 4)


def test_a_collective_on_the_sparse_cores_is_counted() -> None:
    text = (
        "%called (p: bf16[64,128], t: token[]) -> bf16[16,128] {\n"
        "  %t = token[] parameter(1)\n  %p = bf16[64,128]{1,0} parameter(0)\n"
        "  ROOT %r = bf16[16,128]{1,0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, "
        'dimensions={0}, to_apply=%add\n}, execution_thread="sparsecore"\n\n'
        "ENTRY %main (x: bf16[64,128]) -> bf16[16,128] {\n"
        "  %x = bf16[64,128]{1,0} parameter(0)\n"
        "  %s = ((bf16[64,128]{1,0}, token[]), bf16[16,128]{1,0}) call-start(%x), "
        'async_execution_thread="sparsecore", to_apply=%called\n'
        "  ROOT %d = bf16[16,128]{1,0} call-done(%s)\n}\n"
    )
    (found,) = analyse(parse(text), {}).collectives
    assert (found.kind, found.count, found.bytes, found.group) == (
        "reduce-scatter",
        1,
        16 * 128 * 2,
        4,
    )
