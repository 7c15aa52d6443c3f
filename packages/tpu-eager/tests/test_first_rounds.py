"""The first rounds of a loop record what later rounds record, so that few programs are compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tpu_core import modes
from tpu_core.metrics import METRICS


@pytest.fixture(autouse=True)
def fused():
    with modes.using("fused"):
        yield


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.last = nn.Linear(3, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)) + x)
        x = F.relu(self.norm(self.conv(x)) + x)
        return self.last(x.mean((2, 3)))


def compiles() -> int:
    torch.tpu.synchronize()
    return int(METRICS.snapshot()["compiles"])


def test_momentum_of_a_bias_is_as_it_was_from_the_second_step_on():
    """Its first value is its gradient, which autograd keeps as a matrix of one row."""
    model = Residual().to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(6, 3, 4, 4).to("tpu")
    counts = []
    for _ in range(4):
        before = compiles()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        counts.append(compiles() - before)
    assert counts == [1, 1, 0, 0]


def test_gradients_are_added_in_place_whether_an_op_was_seen_before_or_not():
    """Python looks at each op of a new form; a tensor that it holds is not added to in place."""
    model = Residual().to("tpu")
    recorded = []
    for n in (9, 11, 9, 11):
        seen = len(METRICS.compile_events())
        x = torch.randn(n, 3, 5, 5).to("tpu").requires_grad_()
        model.zero_grad()
        model(x).sum().backward()
        torch.tpu.synchronize()
        recorded += [[op for _, op in e.contents] for e in METRICS.compile_events()[seen:]]
    # One as it is, one on padded arrays.
    assert len(recorded) == 2
    assert recorded[0] == recorded[1]
    assert "aten.add_.Tensor" in recorded[0]
