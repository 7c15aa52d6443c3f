"""Parts of PyTorch that stand on collectives, each once through."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("tpu", RANK)


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 24).view(4, 6)


def case_start() -> None:
    torch.accelerator.set_device_index(RANK)
    dist.init_process_group()


def case_cpu_offload() -> None:
    net = made().to(DEVICE)
    fully_shard(net, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(batch().to(DEVICE)).sum().backward()
    optimizer.step()
    whole = made()
    whole(batch()).sum().backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    for p, q in zip(net.parameters(), whole.parameters(), strict=True):
        assert p.device.type == "cpu"
        assert_close(p.full_tensor().cpu(), q.detach(), rtol=1e-4, atol=1e-5)


def case_zero_redundancy_optimizer() -> None:
    model = DistributedDataParallel(made().to(DEVICE))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(batch().to(DEVICE)).sum().backward()
    optimizer.step()
    whole = made()
    whole(batch()).sum().backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert_close(p.detach().cpu(), q.detach(), rtol=1e-4, atol=1e-5)


def case_compiled_collective() -> None:
    @torch.compile(fullgraph=True)
    def f(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    assert f(torch.ones(3, device=DEVICE)).tolist() == [2.0 * SIZE + 1] * 3


def case_compiled_ddp() -> None:
    model = torch.compile(DistributedDataParallel(made().to(DEVICE)))
    model(batch().to(DEVICE)).sum().backward()


def case_batch_norm_over_ranks() -> None:
    layers = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    net = nn.SyncBatchNorm.convert_sync_batchnorm(layers).to(DEVICE)
    x = batch()
    out = net(x.chunk(SIZE)[RANK].to(DEVICE))
    out.sum().backward()
    torch.manual_seed(0)
    everyone = funcol.all_gather_tensor(out.detach(), 0, dist.group.WORLD)
    assert_close(everyone.mean(0).cpu(), torch.zeros(4), rtol=0, atol=1e-5)


def case_pipeline() -> None:
    net = made()
    part = (net[:2] if RANK == 0 else net[2:]).to(DEVICE)
    stage = PipelineStage(part, RANK, SIZE, DEVICE)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.05)
    whole = made()
    whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=0.05)
    target = torch.ones(4, 4)
    for _ in range(3):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if RANK == 0:
            schedule.step(batch().to(DEVICE))
        else:
            schedule.step(target=target.to(DEVICE), losses=losses)
        optimizer.step()
        whole_optimizer.zero_grad()
        loss = F.mse_loss(whole(batch()), target)
        loss.backward()
        whole_optimizer.step()
        if RANK == 1:
            assert_close(torch.stack(losses).mean().cpu(), loss.detach(), rtol=1e-4, atol=1e-5)
    for p, q in zip(part.parameters(), (whole[:2], whole[2:])[RANK].parameters(), strict=True):
        assert_close(p.detach().cpu(), q.detach(), rtol=1e-4, atol=1e-5)


def case_ranks_with_more_batches() -> None:
    model = DistributedDataParallel(made().to(DEVICE))
    with Join([model]):
        for _ in range(1 + RANK):
            model(batch().to(DEVICE)).sum().backward()


def case_end() -> None:
    dist.barrier()
    dist.destroy_process_group()
