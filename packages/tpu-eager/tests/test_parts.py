"""Parts of segments beyond the recompile limit: CPU kernels until a program of theirs would pay."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compile_counts import compiles
from tpu_core import modes
from tpu_core.config import override
from tpu_core.metrics import METRICS
from tpu_core.runtime import initialize
from tpu_eager.bucketing import host_runs, new_sizes, policy, small_reads
from tpu_eager.fused import bucketed

LIMIT = 4  # so that tests are short

pytestmark = [
    pytest.mark.filterwarnings("ignore::tpu_core.errors.RecompileLimitWarning"),
    pytest.mark.filterwarnings("ignore::tpu_core.errors.HostSyncWarning"),
]


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setattr(small_reads, "OPS", 0)  # the segments here end in reads, and are small
    provider = initialize().builder.provider(bucketed)
    monkeypatch.setattr(provider.limit, "_lines", OrderedDict())
    monkeypatch.setattr(provider, "_parts", host_runs.HostRuns())
    # Sizes that are new to their form have programs at once: the limit is reached in few steps.
    monkeypatch.setattr(new_sizes, "_LEAST_OPS", sys.maxsize)
    with modes.using("fused"), override(recompile_limit=LIMIT):
        yield


class Decoder(nn.Module):
    """Steps of cells on normed images, with positions: ops that PyTorch's CPU has none of."""

    def __init__(self, cell: type[nn.GRUCell] | type[nn.LSTMCell]) -> None:
        super().__init__()
        self.norm, self.cell, self.out = (
            nn.InstanceNorm1d(4, affine=True),
            cell(4, 6),
            nn.Linear(6, 4),
        )

    def forward(self, x: torch.Tensor, ways: list[int]) -> torch.Tensor:
        x = self.norm(x).mean(-1) + torch.arange(4, device=x.device)
        state, total = None, torch.zeros((), device=x.device)
        for way in ways:
            state = self.cell(x, state)
            hidden = state[0] if isinstance(state, tuple) else state
            logits = self.out(hidden)
            x = (logits.tanh(), F.relu(logits), logits.softmax(1), logits.cumsum(0))[way]
            total = total + x.square().mean()
        return total


def training(cell: type[nn.GRUCell] | type[nn.LSTMCell], seed: int) -> Callable[[int], None]:
    """A step of training by other branches each time, on the device and on the CPU."""
    torch.manual_seed(seed)
    draw, model, on_device = random.Random(seed), Decoder(cell), Decoder(cell).to("tpu")
    on_device.load_state_dict(model.state_dict())
    pairs = [(m, torch.optim.Adagrad(m.parameters(), 0.01)) for m in (model, on_device)]

    def step(_: int) -> None:
        x = torch.randn(draw.randrange(2, 9), 4, draw.randrange(5, 12))
        ways = [draw.randrange(4) for _ in range(draw.randrange(2, 6))]
        losses = []
        for m, optimizer in pairs:
            optimizer.zero_grad()
            loss = m(x.to(m.out.weight.device), ways)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)

    return step


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell])
def test_a_loop_that_branches_is_no_program_a_step(cell):
    step = training(cell, 1)
    compiles(step, range(3 * LIMIT))
    before = METRICS.snapshot()
    assert compiles(step, range(12)) <= 1  # the words of checks of another number of ops
    assert METRICS.delta(before)["host_parts"] >= 12


def test_a_part_is_compiled_once_its_runs_have_taken_as_long(monkeypatch):
    """From the sizes that were seen: no program is made for a single one of them."""
    monkeypatch.setattr(policy, "host_seconds", lambda s: 1.0)
    monkeypatch.setattr(policy, "compile_seconds", lambda nodes: 4.0)
    draw, weight = random.Random(1), torch.randn(6, 6)

    def work(x: torch.Tensor, w: torch.Tensor, way: int) -> torch.Tensor:
        for _ in range(way):
            x = torch.fft.fft(x).real * 0.2
        for _ in range(4):
            x = ((x @ w).tanh() + x.mean(0)).relu() - 0.1
        return x.softmax(1).log().sum(0)

    def step(way: int) -> None:
        x = torch.randn(draw.randrange(3, 40), 6)
        got = work(x.to("tpu"), weight.to("tpu"), way)
        torch.testing.assert_close(got.cpu(), work(x, weight, way), rtol=1e-4, atol=1e-5)

    compiles(step, range(2 * LIMIT))  # other ops before the same row of ops
    assert compiles(step, range(2 * LIMIT, 2 * LIMIT + 3)) <= 1
    before = METRICS.snapshot()
    assert compiles(step, range(2 * LIMIT + 3, 3 * LIMIT + 3)) == 0
    assert METRICS.delta(before)["padded_executions"] >= LIMIT


@pytest.mark.parametrize("warns", [True, False])
def test_a_line_with_the_ops_of_one_at_its_limit_is_at_its_own(warns):
    """A step that begins to read its loss ends at another line."""
    draw, weight = random.Random(2), torch.randn(6, 6)
    optimized = torch.zeros(6)

    def work(x: torch.Tensor, w: torch.Tensor, way: int) -> torch.Tensor:
        for _ in range(5):
            x = ((x @ w).tanh() + x.mean(0)).relu() - 0.1
        for _ in range(way):
            x = torch.fft.fft(x).real * 0.5
        return x.softmax(1).sum(0)

    def run(x: torch.Tensor, way: int, is_later: bool) -> torch.Tensor:
        found = work(x, weight.to(x.device), way)
        if is_later:
            return found.add(optimized.to(x.device)).square()
        return found.sub(optimized.to(x.device)).abs()

    def step(way: int) -> None:
        x = torch.randn(draw.randrange(3, 40), 6)
        for is_later in [False] if way < 2 * LIMIT else [True]:
            got = run(x.to("tpu"), way % 11, is_later)
            torch.testing.assert_close(got.cpu(), run(x, way % 11, is_later), rtol=1e-4, atol=1e-5)

    with override(performance_warnings=warns):  # which decide nothing
        assert compiles(step, range(2 * LIMIT)) >= LIMIT
        assert compiles(step, range(2 * LIMIT, 3 * LIMIT)) <= 1


def test_the_gradient_of_the_last_rows_of_any_length_is_one_program():
    draw, weight = random.Random(3), torch.randn(4, 4)

    def gradients(x: torch.Tensor, w: torch.Tensor, last: int) -> list[torch.Tensor]:
        w = w.detach().requires_grad_()
        hidden = torch.tanh(w @ x)
        (hidden[..., -last:].square().mean() + hidden[..., :last].sum() * 0.1).backward()
        assert w.grad is not None
        return [hidden.detach().cpu(), w.grad.cpu()]

    def step(_: int) -> None:
        x, last = (
            torch.randn(draw.randrange(2, 9), 4, draw.randrange(20, 60)),
            draw.randrange(2, 10),
        )
        got = gradients(x.to("tpu"), weight.to("tpu"), last)
        torch.testing.assert_close(got, gradients(x, weight, last), rtol=1e-4, atol=1e-5)

    assert compiles(step, range(16)) <= 5
    assert compiles(step, range(16)) == 0


def test_each_further_program_has_to_be_earned_by_twice_as_much():
    runs = host_runs.HostRuns()
    assert [runs.pays("a", 1.0, 2.0) for _ in range(8)] == [i in (2, 7) for i in range(8)]
    assert not runs.pays("b", 1.0, 2.0)
