"""Parts of PyTorch that stand on collectives, each once through."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
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


def case_fsdp1() -> None:
    model = FullyShardedDataParallel(made().to(DEVICE), device_id=RANK, use_orig_params=True)
    out = model(batch().to(DEVICE))
    out.sum().backward()
    assert_close(out.detach().cpu(), made()(batch()).detach(), rtol=1e-4, atol=1e-5)


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


def case_checkpoint() -> None:
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders, 0)
    net = made().to(DEVICE)
    fully_shard(net)
    dcp.save({"net": net.state_dict()}, checkpoint_id=f"{folders[0]}/now")
    dcp.async_save({"net": net.state_dict()}, checkpoint_id=f"{folders[0]}/later").result()
    for name in ("now", "later"):
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
        state = {"net": net.state_dict()}
        dcp.load(state, checkpoint_id=f"{folders[0]}/{name}")
        net.load_state_dict(state["net"])
        for p, q in zip(net.parameters(), made().parameters(), strict=True):
            assert_close(p.full_tensor().cpu(), q.detach(), rtol=0, atol=0)


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
    whole = made()
    part = (whole[:2] if RANK == 0 else whole[2:]).to(DEVICE)
    schedule = ScheduleGPipe(
        PipelineStage(part, RANK, SIZE, DEVICE), n_microbatches=2, loss_fn=F.mse_loss
    )
    losses: list[torch.Tensor] = []
    target = torch.ones(4, 4)
    if RANK == 0:
        schedule.step(batch().to(DEVICE))
    else:
        schedule.step(target=target.to(DEVICE), losses=losses)
        expected = F.mse_loss(made()(batch()), target)
        assert_close(torch.stack(losses).mean().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)


def case_ranks_with_more_batches() -> None:
    model = DistributedDataParallel(made().to(DEVICE))
    with Join([model]):
        for _ in range(1 + RANK):
            model(batch().to(DEVICE)).sum().backward()


def case_end() -> None:
    dist.barrier()
    dist.destroy_process_group()
