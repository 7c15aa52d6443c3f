"""Writes: several parts of a storage by one op, through layouts, at moving offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from storage_tools import EVERY_MODE, WHOLE, arange, programs
from tpu_core import modes


def bucket(device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A flat buffer and its parts, as DDP lays gradients out."""
    flat = torch.arange(12.0).to(device)
    return flat, [flat[:6].view(2, 3), flat[6:10].view(2, 2), flat[10:]]


@EVERY_MODE
@pytest.mark.parametrize(
    "op",
    [
        lambda parts: torch._foreach_add_(parts, 1),
        lambda parts: torch._foreach_mul_(parts, [2.0, 3.0, 4.0][: len(parts)]),
        lambda parts: torch._foreach_zero_(parts),
        lambda parts: torch._foreach_copy_(parts, [torch.full_like(p, p.dim()) for p in parts]),
        lambda parts: torch._foreach_addcmul_(parts, [p.clone() for p in parts], parts, value=0.5),
        lambda parts: torch._foreach_lerp_(parts, [torch.ones_like(p) for p in parts], 0.5),
    ],
)
def test_foreach_over_the_parts_of_a_bucket(op: Callable[[Any], Any], mode: modes.Mode):
    with modes.using(mode):
        for order in ((0, 1, 2), (2, 0, 1), (1,)):
            (a, b), (host, device) = zip(bucket("cpu"), bucket("tpu"))
            op([host[i] for i in order])
            op([device[i] for i in order])
            assert torch.equal(b.cpu(), a)
            for p, q in zip(host, device):
                assert torch.equal(q.cpu(), p)


def test_foreach_over_a_whole_storage_and_parts_of_it():
    flat = arange(6)
    # The first write covers the storage in another shape than that of its value.
    torch._foreach_zero_([flat.view(2, 3), flat[1:3]])
    assert flat.tolist() == [0] * 6
    flat = arange(6)
    torch._foreach_copy_(
        [flat.view(2, 3), flat[1:3]],
        [torch.ones(2, 3, device="tpu"), torch.zeros(2, device="tpu")],
    )
    assert flat.tolist() == [1, 0, 0, 1, 1, 1]


def test_split_with_sizes_copy_into_a_bucket():
    flat = arange(2, 6)
    source = arange(2, 6) * 10
    outs = [flat[:, :2], flat[:, 2:]]
    torch.split_with_sizes_copy(source, [2, 4], dim=1, out=outs)
    assert torch.equal(flat.cpu(), source.cpu())


@EVERY_MODE
def test_channels_last_tensors_stay_so(mode: modes.Mode):
    with modes.using(mode):
        host = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
        x = host.to("tpu")
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert (x + 1).stride() == host.stride()
        x.mul_(2)
        x.permute(0, 2, 3, 1).view(12, 2)[0] = -1
        host.mul_(2)
        host.permute(0, 2, 3, 1).view(12, 2)[0] = -1
        assert torch.equal(x.cpu(), host) and x.cpu().stride() == host.stride()
        flat = torch.empty(0, device="tpu").set_(x.untyped_storage())
        assert flat.tolist() == host.permute(0, 2, 3, 1).flatten().tolist()
        assert torch.equal(x.contiguous().cpu(), host.contiguous())
        assert torch.equal(torch.empty_like(x).copy_(host.contiguous()).cpu(), host)


@EVERY_MODE
def test_empty_tensors(mode: modes.Mode):
    with modes.using(mode):
        x = torch.empty(0, 3, device="tpu")
        assert (x + 1).shape == (0, 3)
        assert x.add_(1).cpu().shape == (0, 3)
        assert x.sum().item() == 0
        assert torch.cat([x, torch.ones(1, 3, device="tpu")]).tolist() == [[1, 1, 1]]
        assert x.view(3, 0).t().clone().shape == (0, 3)
        assert torch.zeros(2, 3, device="tpu")[:, 3:].fill_(1).shape == (2, 0)


@EVERY_MODE
def test_tensors_of_no_dim(mode: modes.Mode):
    with modes.using(mode):
        base = arange(3)
        x = base[1]
        assert (x.dim(), x.item()) == (0, 1)
        x.add_(5)
        x.view(1).mul_(2)
        assert base.tolist() == [0, 12, 2]
        y = torch.tensor(2.5, device="tpu")
        y.copy_(x)
        assert y.expand(2, 2).tolist() == [[12, 12], [12, 12]]
        assert torch.tensor(7, device="tpu").view(1, 1).squeeze().item() == 7


@EVERY_MODE
def test_uninitialised_memory_is_the_same_at_each_read(mode: modes.Mode):
    with modes.using(mode):
        x = torch.empty(2, 3, device="tpu")
        assert torch.equal(x.cpu(), x.cpu())
        x[0] = 1
        assert x[0].tolist() == [1, 1, 1]
        assert torch.equal((x + 0).cpu(), x.cpu())
        y = torch.empty_strided((2, 2), (3, 1), device="tpu")
        y.fill_(4)
        assert y.tolist() == [[4, 4], [4, 4]]


def test_writing_through_a_repeated_dim():
    x = torch.zeros(2, 1, device="tpu")
    x.expand(2, 3).fill_(3)
    assert x.tolist() == [[3], [3]]
    y = torch.zeros(4, device="tpu")
    y[1:3].view(2, 1).expand(2, 5).zero_().fill_(1)
    assert y.tolist() == [0, 1, 1, 0]


@EVERY_MODE
@pytest.mark.parametrize(
    "step",
    [
        lambda cache, pos, k: cache[:, pos].copy_(k),
        lambda cache, pos, k: cache.__setitem__((slice(None), pos), k),
        lambda cache, pos, k: cache.__setitem__((slice(None), slice(pos, pos + 1)), k[:, None]),
        lambda cache, pos, k: cache[:, pos : pos + 2].add_(k[:, None]),
        lambda cache, pos, k: cache.transpose(0, 1)[pos].mul_(k),
        lambda cache, pos, k: k.add_(cache[:, pos]),
        lambda cache, pos, k: cache.narrow(1, pos, 2).fill_(1.0),
        lambda cache, pos, k: cache.__setitem__((slice(None), pos, slice(1, 3)), 2.0),
    ],
)
def test_moving_position_compiles_at_most_twice(step: Callable[..., Any], mode: modes.Mode):
    host, device = torch.zeros(2, 12, 4), torch.zeros(2, 12, 4, device="tpu")
    values = torch.arange(8.0).view(2, 4)
    on_device = values.to("tpu")
    torch.tpu.synchronize()
    with modes.using(mode), programs() as made:
        for pos in range(10):
            step(host, pos, values)
            step(device, pos, on_device)
            if mode is WHOLE:
                torch.tpu.synchronize()
        assert made() <= 2
        assert torch.equal(device.cpu(), host)
        assert torch.equal(on_device.cpu(), values)


@pytest.mark.usefixtures("tier")
@pytest.mark.parametrize("tier", ["compiled", "auto"], indirect=True)
def test_views_as_a_larger_type_and_a_smaller_one() -> None:
    results = []
    for device in ("cpu", "tpu"):
        x = torch.arange(60, dtype=torch.float32, device=device)
        x.view(torch.int16)[::7] = 1
        results.append([x[:3].view(torch.uint8).clone(), x.view(torch.int64)[::2].clone()])
    for expected, result in zip(*results):
        torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=0)
