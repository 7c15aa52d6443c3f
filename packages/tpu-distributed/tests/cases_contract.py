"""Rows of the device contract that need a group and that no other cases show."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed._tools.memory_tracker import MemoryTracker
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("tpu", RANK)
CHECKPOINTS = Path(os.environ["CHECKPOINTS"])


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 24 * SIZE).view(4 * SIZE, 6)


def trained(model: nn.Module, x: torch.Tensor) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    F.mse_loss(model(x), torch.ones(x.shape[0], 4, device=x.device)).backward()
    optimizer.step()
    return optimizer


def case_mesh() -> None:
    # It makes the default group, and takes the device of LOCAL_RANK.
    mesh = init_device_mesh("tpu", (SIZE,))
    assert (mesh.device_type, mesh.size(), mesh.get_local_rank()) == ("tpu", SIZE, RANK)
    assert torch.tpu.current_device() == torch.accelerator.current_device_index() == RANK
    assert torch.ones(2, device="tpu").device == DEVICE
    assert dist.get_world_size() == SIZE


def case_profiles_of_ranks_lie_in_one_folder() -> None:
    folder = Path(os.environ["CHECKPOINTS"]) / "profiles"
    x = torch.ones(1024, device="tpu")
    with torch.tpu.profiler.trace(folder) as taken:
        dist.all_reduce(x)
        x.sum().item()
    rows = [e for e in taken.profile.events() if e.name.startswith("all_reduce (")]
    assert [e.device_type == torch.autograd.DeviceType.PrivateUse1 for e in rows] == [True]
    dist.barrier()
    (run,) = folder.glob("plugins/profile/*")
    files = sorted(file.name.split(".", 1)[1] for file in run.iterdir())
    kinds = ("perfetto.json.gz", "xplane.pb")
    assert files == [f"rank{r}.{kind}" for r in range(dist.get_world_size()) for kind in kinds]


def case_hooks_of_pytorch() -> None:
    whole = made()
    F.mse_loss(whole(batch()), torch.ones(4 * SIZE, 4)).backward()
    hooks: dict[Any, float] = {
        default_hooks.allreduce_hook: 1e-6,
        default_hooks.fp16_compress_hook: 1e-3,  # float16 has 11 bits
    }
    for hook, tolerance in hooks.items():
        model = DistributedDataParallel(made().to(DEVICE))
        model.register_comm_hook(None, hook)
        x = batch().chunk(SIZE)[RANK].to(DEVICE)
        F.mse_loss(model(x), torch.ones(4, 4, device=DEVICE)).backward()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert_close(p.grad.cpu(), q.grad, rtol=1e-4, atol=tolerance)
    # PyTorch has a list of devices; `tpu_distributed.bf16_compression_hook` does the same here.
    if torch.version.cuda is None:  # a build with CUDA takes it
        with pytest.raises(TypeError, match="BF16 all reduce communication hook required CUDA"):
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)


def case_fsdp1() -> None:
    whole = made()
    trained(whole, batch())
    model = FullyShardedDataParallel(made().to(DEVICE), device_id=RANK, use_orig_params=True)
    optimizer = trained(model, batch().chunk(SIZE)[RANK].to(DEVICE))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        for name, value in model.state_dict().items():
            assert_close(value.cpu(), whole.state_dict()[name], rtol=1e-4, atol=1e-5)
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    assert {tuple(s["exp_avg"].shape) for s in state["state"].values()} == {
        tuple(p.shape) for p in whole.parameters()
    }
    assert "allocated" in torch.tpu.memory_summary()


def case_checkpoints() -> None:
    net = made()
    fully_shard(net)
    net.to(DEVICE)
    expected = {name: p.full_tensor().cpu() for name, p in net.state_dict().items()}
    dcp.async_save({"net": net.state_dict()}, checkpoint_id=CHECKPOINTS / "contract").result()
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    state = {"net": net.state_dict()}
    dcp.load(state, checkpoint_id=CHECKPOINTS / "contract")
    for name, p in state["net"].items():
        assert torch.equal(p.full_tensor().cpu(), expected[name]), name


def case_memory_tracker() -> None:
    net = made().to(DEVICE)
    tracker = MemoryTracker()
    tracker.start_monitor(net)
    net(batch().to(DEVICE)).sum().backward()
    tracker.stop()
    modules = {name.partition(".")[0] for name, _ in tracker.memories_allocated.values()}
    assert {"0", "2"} <= modules
    assert any(mebibytes > 0 for _, mebibytes in tracker.memories_allocated.values())


def case_end() -> None:
    dist.barrier()
    dist.destroy_process_group()
