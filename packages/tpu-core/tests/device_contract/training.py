"""Rows L: pinned memory; K: activation checkpointing; O: optimizers and torch.nn's fast paths."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


def check_pin_memory() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert not x.is_pinned()
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert pinned.device.type == "cpu"
    assert torch.equal(pinned, x)
    assert torch.equal(pinned.to("tpu", non_blocking=True).cpu(), x)
    assert pinned[1:].is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    # The device must have its own copy: PyTorch lets the host write again after the transfer.
    moved = pinned.to("tpu", non_blocking=True)
    torch.accelerator.synchronize()
    pinned.fill_(-1)
    assert torch.equal(moved.cpu(), x)

    data = TensorDataset(torch.arange(8.0).reshape(4, 2), torch.arange(4))
    for workers in (0, 1):
        loader = DataLoader(data, batch_size=2, pin_memory=True, num_workers=workers)
        total = torch.zeros((), device="tpu")
        for features, labels in loader:
            assert features.is_pinned()
            assert labels.is_pinned()
            total += features.to("tpu", non_blocking=True).sum()
        assert total.item() == 28


def check_save_on_cpu() -> None:
    def gradients(**options: object) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).to("tpu")
        x = torch.ones(2, 4, device="tpu")
        if options:
            with torch.autograd.graph.save_on_cpu(device_type="tpu", **options):
                loss = model(x).sum()
        else:
            loss = model(x).sum()
        loss.backward()
        return [p.grad.cpu() for p in model.parameters()]

    expected = gradients()
    for pin_memory in (True, False):
        torch.testing.assert_close(gradients(pin_memory=pin_memory), expected)

    x = torch.arange(16.0, device="tpu")
    side = torch.tpu.Stream()
    side.wait_stream(torch.tpu.current_stream())
    host = torch.empty(16, pin_memory=True)
    with torch.tpu.stream(side):
        host.copy_(x, non_blocking=True)
    side.synchronize()
    assert host.tolist() == list(range(16))


def check_checkpoint() -> None:
    for use_reentrant in (False, True):
        torch.manual_seed(3)
        w = torch.full((64,), 2.0, device="tpu", requires_grad=True)
        x = torch.ones(64, device="tpu", requires_grad=True)

        def block(x: torch.Tensor, w: torch.Tensor = w) -> torch.Tensor:
            return F.dropout(torch.sin(x) * w, 0.5, training=True)

        out = checkpoint(block, x, use_reentrant=use_reentrant)
        state = torch.tpu.get_rng_state()
        out.sum().backward()
        # The recomputation drops what the forward pass dropped and leaves the state as it was.
        assert torch.equal((x.grad != 0).cpu(), (out != 0).cpu())
        kept = (out != 0).float().cpu()
        torch.testing.assert_close(w.grad.cpu(), kept * 2 * torch.sin(torch.ones(64)))
        assert torch.equal(torch.tpu.get_rng_state(), state)


def check_optimizers() -> None:
    from torch.utils._foreach_utils import (
        _get_foreach_kernels_supported_devices,
        _get_fused_kernels_supported_devices,
    )

    assert "tpu" in _get_foreach_kernels_supported_devices()
    assert "tpu" in _get_fused_kernels_supported_devices()

    def parameters_after(device: str, kind: type, **options: object) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        inputs = torch.randn(5, 3)
        model.to(device)
        optimizer = kind(model.parameters(), lr=0.05, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs.to(device)).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]

    for kind, options in (
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.Adagrad, {}),
    ):
        expected = parameters_after("cpu", kind, **options)
        for route in ({}, {"foreach": True}, {"foreach": False}, {"fused": True}):
            actual = parameters_after("tpu", kind, **options, **route)
            # tanh and rsqrt differ in the last bits between XLA and ATen, and three steps follow.
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def check_nn_fast_paths() -> None:
    torch.manual_seed(0)
    tolerance = {"rtol": 1e-4, "atol": 1e-4}  # sums in another order through two layers
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected = encoder(x), attention(x, x, x)[0], encoder(x, src_key_padding_mask=padding)
    encoder, attention = encoder.to("tpu"), attention.to("tpu")
    moved, mask = x.to("tpu"), padding.to("tpu")
    for no_grad in (True, False):
        with torch.set_grad_enabled(not no_grad):
            actual = encoder(moved), attention(moved, moved, moved)[0]
            masked = encoder(moved, src_key_padding_mask=mask)
        for got, want in zip(actual, expected):
            torch.testing.assert_close(got.detach().cpu(), want, **tolerance)
        # What stands at padded positions is not defined, and the fast path leaves zeros there.
        torch.testing.assert_close(
            masked.detach().cpu()[~padding], expected[2][~padding], **tolerance
        )

    norm = nn.BatchNorm1d(4)
    synced = nn.SyncBatchNorm(4)
    batch = torch.randn(6, 4)
    want = copy.deepcopy(norm)(batch).detach()
    for module in (norm.to("tpu"), synced.to("tpu")):
        torch.testing.assert_close(module(batch.to("tpu")).detach().cpu(), want, **tolerance)
    torch.testing.assert_close(norm.running_mean.cpu(), 0.1 * batch.mean(0), **tolerance)

    vector = nn.utils.parameters_to_vector(norm.parameters())
    assert vector.device == torch.device("tpu", 0)
    nn.utils.vector_to_parameters(vector + 1, norm.parameters())
    assert norm.weight.tolist() == [2.0] * 4
