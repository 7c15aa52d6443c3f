"""Fused on each tier: CPU kernels and programs for many sizes take each other's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from tpu_core import modes
from tpu_core.metrics import METRICS

# Sizes that share programs, each often enough to go over to one.
SIZES = (5, 7, 6, 11) * 5


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    with modes.using("fused"):
        yield


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "itself": lambda x: x.add_(x),
    "by way of its transpose": lambda x: x.t().mul_(2).sub_(x.t()),
    "a part of itself": lambda x: x[1:].add_(x[:-1].clone()),
    "a row of itself": lambda x: x.add_(x[0].clone()),
    "a window": lambda x: x[1:, :2].copy_(x[:-1, 1:].clone()),
    "one element": lambda x: x[1].fill_(7),
    "a list of views": lambda x: torch._foreach_mul_([x[0], x[1]], [x[2], x[2]]),
}


def written(device: str, operation: Callable[[torch.Tensor], object]) -> list[torch.Tensor]:
    """Matrices, copies of them and their sums after an operation."""
    found = []
    for n in SIZES:
        x = torch.arange(3.0 * n).view(n, 3).to(device)
        y = x * 2 - 1
        total = y.sum().item()  # ends a segment
        kept = y.clone()
        operation(y)
        found += [y.cpu().clone(), kept.cpu(), (y.sum(0) + total).cpu()]
    return found


@pytest.mark.parametrize("name", WRITES)
def test_writes(name: str, every_tier: None, request: pytest.FixtureRequest) -> None:
    before = METRICS.snapshot()
    ours = written("tpu", WRITES[name])
    made = METRICS.delta(before)
    assert_close(ours, written("cpu", WRITES[name]))
    tiers = request.node.callspec.params["every_tier"]
    assert (made["padded_executions"] > 0) == (tiers != "host")
    assert (made["host_ops"] > 0) == (tiers != "compiled")


@pytest.mark.parametrize("shift", [0, 1])
def test_windows_that_move(shift: int, every_tier: None) -> None:
    data = torch.randn(40, 4)
    ours, before = data.to("tpu"), METRICS.snapshot()
    for step in range(12):
        start = shift * step
        total = (ours[start : start + 5] * 2 + ours[start + 1 : start + 6]).relu().sum().item()
        theirs = (data[start : start + 5] * 2 + data[start + 1 : start + 6]).relu().sum()
        assert_close(torch.tensor(total), theirs)
    assert METRICS.delta(before)["compiles"] <= 2


def trained(device: str, sizes: list[int]) -> list[float]:
    """Losses of a training, a batch of each size."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for size in sizes:
        x, y = torch.randn(size, 8).to(device), torch.randint(4, (size,)).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_on_sizes_that_come_again(
    every_tier: None, request: pytest.FixtureRequest
) -> None:
    sizes = [16, 12, 14, 12, 16, 13] * 4
    before = METRICS.snapshot()
    ours = trained("tpu", sizes)
    made = METRICS.delta(before)
    assert_close(ours, trained("cpu", sizes), rtol=1e-4, atol=1e-5)
    tiers = request.node.callspec.params["every_tier"]
    assert (made["padded_executions"] > 0) == (tiers != "host")
    assert (made["promotions"] > 0) == (tiers == "restless")


def test_sizes_that_do_not_come_again_are_never_compiled(restless: None) -> None:
    sizes = list(range(40, 52))  # of no other test, whose segments are remembered
    before = METRICS.snapshot()
    ours = trained("tpu", sizes)
    made = METRICS.delta(before)
    assert made["host_ops"] > 12 * 20
    assert made["promotions"] == made["compiles"] == 0
    assert_close(ours, trained("cpu", sizes), rtol=1e-4, atol=1e-5)
