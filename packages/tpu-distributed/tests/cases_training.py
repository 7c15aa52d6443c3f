"""Training with PyTorch's own parallelisms: as one process on the CPU does it."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from tpu_distributed import bf16_compression_hook, flight_recorder

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("tpu", RANK)
CHECKPOINTS = Path(os.environ["CHECKPOINTS"])
STEPS, BATCH = 2, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(F.relu(self.up(x))))


def made() -> tuple[Net, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(STEPS, BATCH, 6), torch.randn(STEPS, BATCH, 4)


def share(t: torch.Tensor) -> torch.Tensor:
    return t.chunk(SIZE)[RANK].to(DEVICE)


def train(
    model: nn.Module, xs: torch.Tensor, ys: torch.Tensor, foreach: bool | None = None
) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=foreach)
    for x, y in zip(xs, ys, strict=True):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def reference() -> dict[str, torch.Tensor]:
    """Parameters after training on the whole batches, in one process on the CPU."""
    return dict(train(*made()).named_parameters())


def compare(actual: dict[str, torch.Tensor]) -> None:
    for name, expected in reference().items():
        value = actual[name].detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        assert value.device.type == "tpu"
        # Sums over ranks are added in another order than within a batch.
        assert_close(value.cpu(), expected.detach(), rtol=1e-4, atol=1e-5)


def shares(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([share(batch) for batch in t])


def case_start() -> None:
    # As programs written for any accelerator do it.
    assert torch.accelerator.is_available() and torch.accelerator.device_count() >= SIZE
    torch.accelerator.set_device_index(RANK)
    backend = dist.get_default_backend_for_device(DEVICE)
    assert backend == "tpu"
    dist.init_process_group(backend=backend, device_id=DEVICE)
    assert torch.accelerator.current_device_index() == RANK


def case_ddp() -> None:
    net, xs, ys = made()
    net.to(RANK)  # an index: of the current accelerator
    if RANK:
        for p in net.parameters():
            p.detach().zero_()  # rank 0's are sent to all
    model = DistributedDataParallel(net, device_ids=[RANK])
    train(model, shares(xs), shares(ys))
    compare(dict(net.named_parameters()))
    logged = model._get_ddp_logging_data()
    assert logged["avg_backward_compute_time"] > 0 and logged["avg_backward_comm_time"] > 0


def case_ddp_variants() -> None:
    net, xs, ys = made()
    net.to(DEVICE)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)
    train(model, shares(xs), shares(ys))
    compare(dict(net.named_parameters()))

    net, xs, ys = made()
    net.to(DEVICE)
    net.unused = nn.Linear(3, 3, device=DEVICE)
    model = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.0001)
    train(model, shares(xs), shares(ys))
    compare(dict(net.named_parameters()))


def case_ddp_no_sync() -> None:
    net, xs, ys = made()
    whole = copy.deepcopy(net)
    for x, y in zip(xs[:2], ys[:2], strict=True):
        F.mse_loss(whole(x), y).backward()
    net.to(DEVICE)
    model = DistributedDataParallel(net)
    with model.no_sync():
        F.mse_loss(model(share(xs[0])), share(ys[0])).backward()
    F.mse_loss(model(share(xs[1])), share(ys[1])).backward()
    for p, q in zip(net.parameters(), whole.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert_close(p.grad.cpu(), q.grad, rtol=1e-4, atol=1e-5)


def case_ddp_no_new_programs() -> None:
    net, xs, ys = made()
    net.to(DEVICE)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiles = []
    for step in range(8):
        optimizer.zero_grad()
        loss = F.mse_loss(model(share(xs[step % STEPS])), share(ys[step % STEPS]))
        loss.backward()
        optimizer.step()
        if RANK == 0:  # logs and saves alone
            loss.item()
            {k: v.cpu() for k, v in net.state_dict().items()}
        metrics = torch.tpu.metrics()
        compiles.append(metrics["compiles"] + metrics["cache_hits_disk"])
    assert compiles[3] == compiles[-1], compiles


def case_ddp_bf16_hook() -> None:
    net, xs, ys = made()
    net.to(DEVICE)
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, bf16_compression_hook)
    train(model, shares(xs), shares(ys))
    whole = reference()
    for name, p in net.named_parameters():
        assert p.grad is not None and p.grad.dtype == torch.float32
        # bfloat16 has 8 bits; Adam's steps are of 0.05 whatever the gradient's size.
        assert (p.detach().cpu() - whole[name]).abs().mean() < 0.02
    gradients = flight_recorder().records()[-1]
    assert (gradients["kind"], gradients["dtypes"]) == ("all_reduce", ["bfloat16"])


def case_fsdp2() -> None:
    net, xs, ys = made()
    for layer in (net.up, net.down):
        fully_shard(layer)
    fully_shard(net)
    net.to(DEVICE)
    assert net.up.weight.to_local().shape[0] == 16 // SIZE
    train(net, shares(xs), shares(ys))
    compare(dict(net.named_parameters()))
    # Read by fewer ranks, see test_processes.py.
    state = {"net": net.state_dict()}
    dcp.save(state, checkpoint_id=CHECKPOINTS / "of-two")
    full = {name: p.full_tensor().cpu() for name, p in state["net"].items()}
    if RANK == 0:
        torch.save(full, CHECKPOINTS / "full.pt")


def case_checkpoint_of_fewer_ranks() -> None:
    net, _, _ = made()
    if RANK == 0:
        whole = {"net": {name: p + 1 for name, p in net.state_dict().items()}}
        dcp.save(whole, checkpoint_id=CHECKPOINTS / "of-one", no_dist=True)
    dist.barrier()
    fully_shard(net)
    net.to(DEVICE)
    state = {"net": net.state_dict()}
    dcp.load(state, checkpoint_id=CHECKPOINTS / "of-one")
    net.load_state_dict(state["net"])
    for p, q in zip(net.parameters(), made()[0].parameters(), strict=True):
        assert p.to_local().shape[0] <= (q.shape[0] + 1) // SIZE
        assert_close(p.full_tensor().cpu(), q.detach() + 1, rtol=0, atol=0)


def case_fsdp2_mixed_precision() -> None:
    net, xs, ys = made()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(net, mp_policy=policy, reshard_after_forward=False)
    net.to(DEVICE)
    seen = []
    net.up.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    train(net, shares(xs), shares(ys))
    assert seen == [torch.bfloat16] * STEPS
    whole = reference()
    for name, p in net.named_parameters():
        # bfloat16 has 8 bits; Adam's steps are of 0.05 whatever the gradient's size.
        assert (p.full_tensor().cpu() - whole[name]).abs().mean() < 0.05


def case_fsdp2_activation_checkpointing() -> None:
    net, xs, ys = made()
    calls = []
    net.up.register_forward_pre_hook(lambda m, inputs: calls.append(m))
    apply_activation_checkpointing(net, check_fn=lambda m: isinstance(m, nn.Linear))
    fully_shard(net)
    net.to(DEVICE)
    train(net, shares(xs), shares(ys))
    assert len(calls) == 2 * STEPS  # again in each backward
    prefix = "_checkpoint_wrapped_module."
    compare({name.replace(prefix, ""): p for name, p in net.named_parameters()})


def case_dtensor() -> None:
    mesh = init_device_mesh("tpu", (SIZE,))
    full = torch.arange(24.0).view(8, 3)
    t = distribute_tensor(full.to(DEVICE), mesh, [Shard(0)])
    assert t.to_local().shape == (8 // SIZE, 3)
    assert_close(t.full_tensor().cpu(), full)
    assert_close(t.redistribute(mesh, [Shard(1)]).full_tensor().cpu(), full)
    weight = distribute_tensor(torch.ones(3, 2, device=DEVICE), mesh, [Replicate()])
    assert_close((t @ weight).full_tensor().cpu(), full @ torch.ones(3, 2))
    assert_close(t.sum().full_tensor().cpu(), full.sum())
    part = DTensor.from_local(torch.ones(2, device=DEVICE), mesh, [Partial()])
    assert part.full_tensor().tolist() == [SIZE] * 2
    torch.manual_seed(3)
    drawn = torch.distributed.tensor.rand(8, 4, device_mesh=mesh, placements=[Shard(0)])
    halves = drawn.full_tensor().cpu().chunk(SIZE)
    assert not torch.equal(halves[0], halves[1])


def case_attention_of_dtensors() -> None:
    mesh = init_device_mesh("tpu", (SIZE,))
    torch.manual_seed(0)
    query, keys, values = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    shared = [t[:, :2] for t in (keys, values)]  # two heads of queries for one of keys
    bias = torch.randn(1, 4, 6, 5)

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])

    batch, heads, plain = Shard(0), Shard(1), [query, keys, values]
    for inputs, ways in (
        (plain, (Replicate(), batch)),
        ([*plain, bias], (batch, heads)),
        ([query, *shared], (heads,)),
    ):
        whole = [t.clone().requires_grad_() for t in inputs]
        expected = attention(*whole)
        expected.square().sum().backward()
        for placement in ways:
            parts = []
            for t in inputs:
                divides = isinstance(placement, Shard) and t.shape[placement.dim] > 1
                placements = [placement if divides else Replicate()]
                parts.append(distribute_tensor(t.to(DEVICE), mesh, placements).requires_grad_())
            out = attention(*parts)
            assert out.placements == (placement,)
            assert_close(out.full_tensor().detach().cpu(), expected.detach())
            out.square().sum().backward()
            for part, t in zip(parts, whole, strict=True):
                assert part.grad is not None and t.grad is not None
                assert_close(part.grad.full_tensor().cpu(), t.grad, rtol=1e-4, atol=1e-5)


def case_tensor_parallel() -> None:
    net, xs, ys = made()
    net.to(DEVICE)
    mesh = init_device_mesh("tpu", (SIZE,))
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    # PyTorch's foreach takes parameters that are all DTensors, and the norm's are not.
    train(net, xs.to(DEVICE), ys.to(DEVICE), foreach=False)
    compare(dict(net.named_parameters()))


def case_an_index_out_of_range_on_one_rank() -> None:
    """The rank that has it raises at its next read, and all go on with the same parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Linear(48, 10)).to(DEVICE)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        indices, labels = torch.randint(0, 10, (4, 6)), torch.randint(0, 10, (4,))
        is_wrong = RANK == 1 and step == 2
        if is_wrong:
            indices[1, 2] = 12
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(indices.to(DEVICE)), labels.to(DEVICE))
        loss.backward()
        optimizer.step()
        if is_wrong:
            with pytest.raises(IndexError, match="index out of range in self") as raised:
                loss.item()
            assert any("aten.embedding" in note for note in raised.value.__notes__)
        else:
            assert loss.isfinite().item()
    weight = net[2].weight.detach()
    others = [torch.empty_like(weight) for _ in range(SIZE)]
    dist.all_gather(others, weight)
    assert all(torch.equal(other, weight) for other in others)


def case_end() -> None:
    dist.barrier()
    dist.destroy_process_group()
