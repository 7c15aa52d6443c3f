"""Captured graphs in the modes of this package; what they may hold is tested in tpu-core."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.skipif(
    not hasattr(torch.accelerator, "Graph"), reason="torch.accelerator.Graph is of torch 2.13"
)


def train(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("mode", ["fused", "debug"])
def test_training_step(mode: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    device = copy.deepcopy(model).to("tpu")
    batches = [torch.randn(4, 6) for _ in range(6)]
    static = batches[0].to("tpu")
    expected = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(device.parameters(), lr=0.1, momentum=0.9)
    with torch.tpu.set_eager_mode(mode):
        train(model, batches[0], expected)
        train(device, static, optimizer)
        graph = torch.accelerator.Graph()
        with graph:
            loss = train(device, static, optimizer)
        for x in batches[1:]:
            static.copy_(x)
            graph.replay()
            torch.testing.assert_close(loss.cpu(), train(model, x, expected).detach())
    for a, b in zip(model.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(b.detach().cpu(), a.detach())


def test_an_optimizer_step_does_not_cut_a_capture():
    p = nn.Parameter(torch.ones(3, device="tpu"))
    optimizer = torch.optim.SGD([p], lr=1.0)
    p.grad = torch.ones_like(p)
    graph = torch.accelerator.Graph()
    with torch.tpu.set_eager_mode("fused"):
        with graph:
            optimizer.step()
            optimizer.step()
        segments = torch.tpu.metrics()["segments"]
        graph.replay()
        assert torch.tpu.metrics()["segments"] == segments + 1
    assert p.tolist() == [-1, -1, -1]
