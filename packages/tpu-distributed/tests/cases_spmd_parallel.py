"""Parallelisms of PyTorch in a region of `tpu_distributed.spmd()`."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import tpu_distributed
from rank_tensors import DEVICE, RANK, SIZE
from tpu_core.errors import SpmdMismatchWarning


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return y


def _trained(
    parallelize: Callable[[nn.Module], object], region: bool, own_data: bool
) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(DEVICE)
    parallelize(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(RANK if own_data else 7)
    ran = 0
    for _ in range(4):
        x = torch.randn(4, 8, generator=generator).to(DEVICE)

        def step(x: torch.Tensor = x) -> None:
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        torch.accelerator.synchronize(DEVICE)
        before = int(torch.tpu.metrics()["executions"])
        tpu_distributed.spmd()(step)() if region else step()
        torch.accelerator.synchronize(DEVICE)
        ran = int(torch.tpu.metrics()["executions"]) - before
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach().cpu() for p in whole], ran


def _compare(parallelize: Callable[[nn.Module], object], own_data: bool) -> None:
    expected, apart = _trained(parallelize, region=False, own_data=own_data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpmdMismatchWarning)
        actual, together = _trained(parallelize, region=True, own_data=own_data)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)
    assert together == 1 < apart


def case_tensor_parallel() -> None:
    dist.init_process_group()
    mesh = init_device_mesh("tpu", (SIZE,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def parallelize(model: nn.Module) -> None:
        for block in model.children():
            parallelize_module(block, mesh, plan)

    _compare(parallelize, own_data=False)


def case_fsdp2() -> None:
    mesh = init_device_mesh("tpu", (SIZE,))

    def parallelize(model: nn.Module) -> None:
        for block in model.children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    _compare(parallelize, own_data=True)


def case_end() -> None:
    dist.barrier()  # rank 0 has the store that the others may be reading
    dist.destroy_process_group()
