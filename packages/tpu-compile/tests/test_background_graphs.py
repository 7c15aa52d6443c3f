"""Compiled graphs where programs are compiled in the background."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tpu_compile.graph_op import GRAPHS
from tpu_core import modes
from tpu_core.config import override
from tpu_core.metrics import METRICS, CompileEvent
from tpu_core.runtime import runtime
from tpu_eager import fused
from tpu_eager.background.scheduler import Background

WAIT = 120.0  # for a worker, which has a low priority


@pytest.fixture(autouse=True)
def in_background() -> Iterator[None]:
    with override(compile="background"), modes.using("fused"):
        yield
        assert background().workers.wait(WAIT)


def background() -> Background:
    found: Background = runtime().builder.provider(fused.background)
    return found


def after(x: torch.Tensor) -> torch.Tensor:
    """Forty ops of eager, of two kinds."""
    for _ in range(20):
        x = torch.sin(x) + 0.5
    return x


def known(f: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """Give the ops of eager, and what is compiled, programs of their own."""
    with modes.using("strict"):
        after(f(*inputs).detach()).cpu()


def counts(run: Callable[[], object]) -> tuple[int, int]:
    """(compiles, pieces) of a call."""
    before = torch.tpu.metrics()
    run()
    found = torch.tpu.metrics()
    compiles, pieces = (int(found[k] - before[k]) for k in ("compiles", "pieces"))
    return compiles, pieces


def last() -> CompileEvent:
    return METRICS.compile_events()[-1]


def test_a_worker_compiles_a_graph_that_only_this_process_knows() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: torch.tanh(x @ w), lambda x: x - 1, (x,))

    compiled = torch.compile(f, fullgraph=True)
    x, w = torch.randn(5, 6), torch.randn(6, 6)
    inputs = x.to("tpu"), w.to("tpu")
    known(compiled, *inputs)
    results: list[torch.Tensor] = []

    def run() -> None:
        results.append(after(compiled(*inputs)).cpu())

    assert counts(run) == (0, 41)
    assert counts(run)[1] == 41
    assert background().workers.wait(WAIT)
    assert (last().source, last().ops) == ("background", 41)
    assert "came again" in last().reason
    assert counts(run) == (0, 0)
    for result in results:
        torch.testing.assert_close(result, after(f(x, w)))


def test_forward_backward_and_step_in_pieces_then_as_one_program() -> None:
    host = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    device = copy.deepcopy(host).to("tpu")
    compiled = torch.compile(device, fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]
    batches = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(4)]

    def step(model: Callable[..., torch.Tensor], i: int, on: str) -> None:
        optimizer = optimizers[on == "tpu"]
        optimizer.zero_grad()
        x, y = (t.to(on) for t in batches[i])
        loss = F.cross_entropy(model(x), y)
        loss = loss + after(x).sum() * 0 + after(x * 2).mean() * 0
        loss.backward()
        optimizer.step()

    with modes.using("strict"):
        step(compiled, 0, "tpu")
        torch.tpu.synchronize()
    step(host, 0, "cpu")
    pieces = []
    for i in range(1, 4):
        pieces.append(counts(lambda i=i: (step(compiled, i, "tpu"), torch.tpu.synchronize()))[1])
        step(host, i, "cpu")
        assert background().workers.wait(WAIT)
    assert pieces[0] == pieces[1] > 80
    assert pieces[2] == 0
    assert last().source == "background"
    for want, got in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


def test_a_new_graph_is_waited_for_with_the_ops_around_it() -> None:
    # As a piece it would cost nearly what the whole does, though it is one op of 121.
    layers = nn.Sequential(*(nn.Linear(7, 7) for _ in range(12)))
    compiled = torch.compile(copy.deepcopy(layers).to("tpu"), fullgraph=True)
    x = torch.randn(2, 7)
    there = x.to("tpu")
    known(torch.clone, there)
    results: list[torch.Tensor] = []

    def run() -> None:
        results.append(after(after(after(compiled(there)))).detach().cpu())

    assert counts(run) == (1, 0)
    assert (last().source, last().ops) == ("compiled", 121)
    assert "tpu_compile.graph.default: " in last().reason
    torch.testing.assert_close(results[0], after(after(after(layers(x)))).detach())


def test_a_graph_names_the_ops_that_compiling_costs_go_by() -> None:
    GRAPHS.clear()

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x.sin(), (x,))

    torch.compile(f, fullgraph=True)(torch.randn(9, 9).to("tpu"))
    (graph,) = GRAPHS.values()
    assert {"aten.sum.default", "cond", "aten.mm.default", "aten.sin.default"} <= set(graph.ops)


def test_graphs_that_tell_their_sizes_are_waited_for_once_a_bucket() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, 0).cumsum(0) * x.shape[0]

    compiled = torch.compile(f, fullgraph=True)
    begun = len(METRICS.compile_events())
    for n in (5, 7, 6, 8, 3, 7, 5, 33, 40):
        x = torch.randn(n, 4)
        there = x.to("tpu")
        torch._dynamo.mark_dynamic(there, 0, min=2, max=64)
        torch.testing.assert_close(compiled(there).cpu(), f(x), rtol=1e-4, atol=1e-4)
    events = METRICS.compile_events()[begun:]
    assert len(events) <= 3, [e.reason for e in events]
    assert {e.source for e in events} <= {"compiled", "disk"}
    assert all("on padded arrays from now on" in e.reason for e in events)


def test_a_reset_before_the_worker_has_the_graph_leaves_results_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = torch.compile(lambda x: torch.tanh(x) * 3, fullgraph=True)
    x = torch.randn(21)
    there = x.to("tpu")
    known(compiled, there)
    submit = background().workers.submit
    monkeypatch.setattr(
        background().workers, "submit", lambda job, done: (GRAPHS.clear(), submit(job, done))
    )
    want = after(torch.tanh(x) * 3)
    for _ in range(3):
        torch.testing.assert_close(after(compiled(there)).cpu(), want)
        assert background().workers.wait(WAIT)
    assert last().source == "compiled"  # here, since the graph was gone
