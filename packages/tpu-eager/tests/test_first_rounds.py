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


@pytest.mark.parametrize("words", [2, 3, 5])
def test_a_step_with_any_number_of_checked_ops_is_compiled_once(words):
    """The results of the checks are combined into one word, an op of the segment."""
    tables = nn.ModuleList(nn.Embedding(8, 4) for _ in range(words)).to("tpu")
    optimizer = torch.optim.AdamW(tables.parameters())
    counts = []
    for step in range(3):
        before = compiles()
        ids = torch.arange(6).roll(step).to("tpu")
        optimizer.zero_grad()
        sum(table(ids) for table in tables).square().mean().backward()
        optimizer.step()
        counts.append(compiles() - before)
    assert counts == [2, 0, 0]  # the state of the optimizer is a program of its own


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


def steps(optimizer_of, count: int, device: str = "tpu") -> tuple[list[float], list[int]]:
    """Losses of the steps of a small model, and what each compiled."""
    torch.manual_seed(5)
    model = Residual()
    x = torch.randn(5, 3, 4, 4).to(device)
    optimizer = optimizer_of(model.to(device).parameters())
    losses, counts = [], []
    for _ in range(count):
        before = compiles()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        counts.append(compiles() - before)
    return losses, counts


@pytest.mark.parametrize(
    "optimizer_of", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
)
def test_the_first_step_compiles_the_program_of_all_steps(optimizer_of):
    """And one that makes the optimizer's state, of which its later steps know nothing."""
    losses, counts = steps(optimizer_of, 4)
    assert counts[0] <= 2
    assert counts[1:] == [0, 0, 0]
    torch.testing.assert_close(losses, steps(optimizer_of, 4, "cpu")[0], rtol=2e-4, atol=1e-5)


def test_a_second_optimizer_has_the_programs_of_the_first():
    steps(torch.optim.NAdam, 3)
    assert steps(torch.optim.NAdam, 3)[1] == [0, 0, 0]


def test_a_buffer_of_each_round_is_made_in_the_round_s_program():
    counts, executions = [], []
    places, added = torch.tensor([0, 2]).to("tpu"), torch.ones(3, 29).to("tpu")
    for _ in range(4):
        before, ran = compiles(), METRICS.snapshot()["executions"]
        out = torch.zeros(3, 29, device="tpu")
        out[places] = 5.0
        out += added
        assert out[0].tolist() == [6.0] * 29
        counts.append(compiles() - before)
        executions.append(int(METRICS.snapshot()["executions"] - ran))
    assert counts[2:] == [0, 0]
    assert executions[1:] == executions[1:2] * 3
    assert executions[1] < executions[0]


def test_an_interrupt_between_the_state_and_its_first_update_loses_nothing(monkeypatch):
    from tpu_core.compiler import segment as segments

    lower, calls = segments.lower, []

    def interrupted(segment):
        calls.append(len(segment.nodes))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return lower(segment)

    monkeypatch.setattr(segments, "lower", interrupted)
    x = torch.randn(37).to("tpu")
    state = torch.zeros(37, device="tpu")
    state.mul_(0.5).add_(x)
    with pytest.raises(KeyboardInterrupt):
        state.tolist()
    state.add_(x)  # goes on with what is left
    torch.testing.assert_close(state.cpu(), x.cpu() * 2)
    assert calls[0] == 1


def test_state_that_cannot_be_made_fails_what_updates_it(monkeypatch):
    from tpu_core.compiler import segment as segments

    lower = segments.lower

    def failing(segment):
        if len(segment.nodes) == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: no memory for it")
        return lower(segment)

    monkeypatch.setattr(segments, "lower", failing)
    x = torch.randn(2, 3, 5, 7).to("tpu")
    state = torch.zeros(2, 3, 5, 7, device="tpu")
    state.mul_(0.25).add_(x)
    with pytest.raises(RuntimeError, match="no memory for it"):
        state.tolist()
    with pytest.raises(RuntimeError, match="no memory for it"):
        (state + 1).tolist()
    torch.testing.assert_close((x * 3 + 1).cpu(), x.cpu() * 3 + 1)
