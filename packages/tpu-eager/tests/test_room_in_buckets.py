"""Buckets have room for further sizes, where runs in them cost little beside a compile."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tpu_core import config, modes
from tpu_core.metrics import METRICS


@pytest.fixture(autouse=True)
def fused():
    with modes.using("fused"):
        yield


def ragged_steps(device: str, steps: int) -> list[float]:
    """Losses of a training on batches, lengths and counts of selected positions that vary."""
    torch.manual_seed(0)
    draws, g = random.Random(1), torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        b, n = draws.randint(2, 9), draws.randint(5, 30)
        lengths = torch.tensor([draws.randint(2, n) for _ in range(b)])
        keep = (torch.arange(n)[None] < lengths[:, None]).to(device)
        x = torch.randn(b, n, 3, generator=g)
        y = x.sum(-1).round().clamp(0, 4).long().to(device)
        loss = F.cross_entropy(model(x.to(device))[keep], y[keep])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_few_programs_serve_sizes_that_vary_together():
    before = METRICS.snapshot()
    losses = ragged_steps("tpu", 40)
    delta = METRICS.delta(before)
    torch.testing.assert_close(losses, ragged_steps("cpu", 40), rtol=1e-4, atol=1e-5)
    # Loaded ones count: processes of the tests share a folder.
    assert delta["compiles"] + delta["cache_hits_disk"] <= 3
    assert delta["padded_executions"] >= 38


def loop(run, sizes: list[int]) -> list[str]:
    """Reasons of the compiles for some sizes."""
    before = len(METRICS.compile_events())
    for n in sizes:
        run(n)
    return [e.reason for e in METRICS.compile_events()[before:]]


def test_one_program_serves_small_sizes():
    def run(n: int) -> None:
        x = torch.randn(n, 6)
        torch.testing.assert_close((x.to("tpu") * 3).tanh().sum(0).cpu(), (x * 3).tanh().sum(0))

    reasons = loop(run, [3, 5, 9, 17, 31, 4, 20])
    assert len(reasons) == 2
    assert "5 in 32" in reasons[1]


def test_the_users_buckets_have_no_room():
    def run(n: int) -> None:
        x = torch.randn(n, 7)
        torch.testing.assert_close((x.to("tpu") * 5).sin().sum(0).cpu(), (x * 5).sin().sum(0))

    with config.override(buckets=(8, 24, 40)):
        reasons = loop(run, [3, 5, 21])
    assert ["5 in 8" in reasons[1], "21 in 24" in reasons[2]] == [True, True]


@pytest.mark.of_cpu(reason="buckets have more room where runs cost less")
def test_large_arrays_have_no_room():
    def run(n: int) -> None:
        x = torch.ones(n, 1 << 16)
        assert (x.to("tpu") * 7).sum().item() == n * 7 * 2**16

    assert "70 in 96" in loop(run, [66, 70])[1]


def test_what_fills_its_bucket_has_no_room():
    """Weights of other layers are not padded: they would be, by way of the host, in each run."""

    def run(n: int) -> None:
        x, w = torch.randn(5, n), torch.randn(n, n)
        got = torch.mm(x.to("tpu"), w.to("tpu")).exp2().sum(0)
        torch.testing.assert_close(got.cpu(), torch.mm(x, w).exp2().sum(0), rtol=1e-4, atol=1e-4)

    reasons = loop(run, [8, 16, 32])
    assert "16 in 16" in reasons[1] and "32 in 32" in reasons[2]


def test_a_program_takes_arrays_with_the_padding_that_they_have():
    def run(n: int) -> None:
        x = torch.randn(n, 9)
        made = (x.to("tpu") * 11).cos()
        torch.tpu.synchronize()
        before = METRICS.snapshot()
        total = (made * made).exp().sum(0)
        torch.tpu.synchronize()
        copies.append(METRICS.delta(before)["padding_copies"])
        expected = (x * 11).cos()
        torch.testing.assert_close(total.cpu(), (expected * expected).exp().sum(0))

    copies: list[float] = []
    reasons = loop(run, [40, 50, 60, 45])
    assert "50 in 96" in reasons[2] and "50 in 96" in reasons[3]
    assert copies == [0, 0, 0, 0]
