"""Checkpoints: each group loads what groups of other sizes have written, and writes its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CHECKPOINTS = Path(os.environ["CHECKPOINTS"])


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after a step, divided over the group; the batch is the same for every group."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 18), nn.ReLU(), nn.Linear(18, 5)).to("tpu")
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    x = torch.linspace(-1, 1, 48).view(8, 6).to("tpu")
    F.mse_loss(net(x), torch.ones(8, 5, device="tpu")).backward()
    optimizer.step()
    return net, optimizer


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, state = get_state_dict(net, optimizer)
    return {"model": model, "optimizer": state}


def whole(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and moments, undivided."""
    parameters = list(net.parameters())
    moments = [optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
    return [t.full_tensor().detach().cpu() for t in (*parameters, *moments)]


def case_start() -> None:
    torch.accelerator.set_device_index(RANK)
    dist.init_process_group()


def case_what_others_wrote() -> None:
    for folder in CHECKPOINTS.glob("of-*"):
        net, optimizer = trained()
        expected = whole(net, optimizer)
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
                for name in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[p][name].zero_()
        state = state_of(net, optimizer)
        dcp.load(state, checkpoint_id=folder)
        model, moments = state["model"], state["optimizer"]
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=moments)
        for actual, right in zip(whole(net, optimizer), expected, strict=True):
            # Groups of other sizes add gradients up in another order.
            assert_close(actual, right, rtol=1e-4, atol=1e-6)


def case_own() -> None:
    net, optimizer = trained()
    state = state_of(net, optimizer)
    dcp.save(state, checkpoint_id=CHECKPOINTS / f"of-{SIZE}")
    saving = dcp.async_save(state, checkpoint_id=CHECKPOINTS / f"of-{SIZE}-later")
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()  # what is saved was copied before
    saving.result()
    full = {name: p.full_tensor().cpu() for name, p in trained()[0].state_dict().items()}
    if RANK == 0:
        torch.save(full, CHECKPOINTS / "full.pt")


def case_end() -> None:
    dist.barrier()
    dist.destroy_process_group()
