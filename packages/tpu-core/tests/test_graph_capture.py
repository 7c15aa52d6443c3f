"""Captured graphs: replays against loops of eager ops on the CPU."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from graph_marks import CAPTURES
from tpu_core import _C, interop
from tpu_core.errors import GraphCaptureError
from tpu_core.modes import STRICT, Mode, using

pytestmark = [pytest.mark.usefixtures("every_tier"), CAPTURES]


# Those of tpu-eager are tested there.
MODES = {
    "strict": STRICT,
    "waiting": Mode("waiting", 1, wait=True),
    "bounded": Mode("bounded", 7),
    "unbounded": Mode("unbounded", 0),
}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with using(MODES[request.param]):
        yield


def on(x: torch.Tensor) -> torch.Tensor:
    return x.clone().to("tpu")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.detach().cpu(), b.detach().cpu())


def test_nothing_runs_while_a_graph_is_captured():
    x = on(torch.zeros(4))
    graph = torch.accelerator.Graph()
    with graph:
        assert torch.tpu.is_current_stream_capturing()
        x += 1
        y = x * 2
    assert not torch.tpu.is_current_stream_capturing()
    assert x.tolist() == [0] * 4
    graph.replay()
    assert (x.tolist(), y.tolist()) == ([1] * 4, [2] * 4)
    graph.replay()
    assert (x.tolist(), y.tolist()) == ([2] * 4, [4] * 4)


@pytest.mark.usefixtures("mode")
def test_inference():
    model = network().eval()
    device = copy.deepcopy(model).to("tpu")
    static = torch.empty(5, 6, device="tpu")
    graph = torch.accelerator.Graph()
    with graph, torch.no_grad():
        result = device(static)
    for _ in range(4):
        x = torch.randn(5, 6)
        static.copy_(x)
        graph.replay()
        same(result, model(x))


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_training_step(momentum: float):
    """A whole step, in which the gradients are tensors of the graph."""
    model, batches = network(), [torch.randn(5, 6) for _ in range(5)]
    device = copy.deepcopy(model).to("tpu")
    target = torch.randn(5, 3)
    options = {"lr": 0.1, "momentum": momentum}
    optimizers = [torch.optim.SGD(m.parameters(), **options) for m in (model, device)]
    static, static_target = on(batches[0]), on(target)

    def step(m: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor):
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(m(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for m, o, x, y in (
        (model, optimizers[0], batches[0], target),
        (device, optimizers[1], static, static_target),
    ):
        step(m, o, x, y)
    graph = torch.accelerator.Graph()
    with graph:
        loss = step(device, optimizers[1], static, static_target)
    for x in batches:
        expected = step(model, optimizers[0], x, target)
        static.copy_(x)
        graph.replay()
        same(loss, expected)
    for a, b in zip(model.parameters(), device.parameters(), strict=True):
        same(a, b)
        same(a.grad, b.grad)
    for a, b in zip(model.buffers(), device.buffers(), strict=True):
        same(a, b)


def test_adam_counts_on_the_device():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    device = copy.deepcopy(model).to("tpu")
    x = torch.randn(5, 6)
    static = on(x)
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    capturable = torch.optim.Adam(device.parameters(), lr=0.01, capturable=True)

    def step(m: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        m(x).square().mean().backward()
        optimizer.step()

    step(model, plain, x)
    step(device, capturable, static)
    graph = torch.accelerator.Graph()
    with graph:
        step(device, capturable, static)
    for _ in range(4):
        step(model, plain, x)
        graph.replay()
    for a, b in zip(model.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=1e-4, atol=1e-5)


def test_adam_that_counts_on_the_host_is_refused():
    p = nn.Parameter(on(torch.ones(3)))
    optimizer = torch.optim.Adam([p])
    p.grad = torch.ones_like(p)
    with pytest.raises(GraphCaptureError, match="capturable=True"), torch.accelerator.Graph():
        optimizer.step()


@pytest.mark.usefixtures("mode")
def test_views_and_copies():
    a, b = torch.arange(12.0).reshape(3, 4), torch.zeros(4, 3)
    x, y, z = on(a), on(b), torch.empty(4, device="tpu")

    def body(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        y.copy_(x.t())  # a write of all of it
        x[1].mul_(2)
        x[:, 2:] += y[0, :2]
        z.copy_(x[0])
        y.t()[2] = z
        part = x[1:, 1:]
        part.add_(1)
        return part

    graph = torch.accelerator.Graph()
    with graph:
        part = body(x, y, z)
    c = torch.empty(4)
    for _ in range(3):
        expected = body(a, b, c)
        graph.replay()
        for ours, theirs in ((x, a), (y, b), (z, c), (part, expected)):
            same(ours, theirs)
    assert part.data_ptr() == x[1:, 1:].data_ptr()


def test_tensors_that_share_a_value():
    """A copy of a whole tensor shares its value until one is written."""
    x = on(torch.ones(3))
    y = torch.empty(3, device="tpu")
    y.copy_(x)
    graph = torch.accelerator.Graph()
    with graph:
        z = x + 10 * y
        x.copy_(y)
        y += 1
    same(x + y, torch.full((3,), 2.0))
    for i in range(3):
        x.fill_(5)
        graph.replay()
        assert z.tolist() == [15 + 10 * i] * 3
        assert (x.tolist(), y.tolist()) == ([1 + i] * 3, [2 + i] * 3)


def test_results_that_swap_their_storages():
    a, b = on(torch.tensor([1.0])), on(torch.tensor([2.0]))
    graph = torch.accelerator.Graph()
    with graph:
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
    for i in range(3):
        graph.replay()
        assert (a.item(), b.item()) == ((2, 1), (1, 2))[i % 2]


@pytest.mark.usefixtures("mode")
def test_random_numbers_go_on():
    """Replays draw what the eager loop would have drawn, and the capture draws nothing."""
    torch.manual_seed(5)
    generator = torch.Generator("tpu").manual_seed(7)
    x = torch.ones(64, device="tpu")

    def body() -> tuple[torch.Tensor, ...]:
        return (
            nn.functional.dropout(x, 0.5),
            torch.randn(8, device="tpu"),
            torch.rand(8, device="tpu", generator=generator),
        )

    state, own = torch.tpu.get_rng_state(), generator.get_state()
    expected = [[t.cpu() for t in body()] for _ in range(3)]
    torch.tpu.set_rng_state(state)
    generator.set_state(own)
    graph = torch.accelerator.Graph()
    with graph:
        results = body()
    assert torch.equal(torch.tpu.get_rng_state(), state)
    for round_ in expected:
        graph.replay()
        for ours, theirs in zip(results, round_, strict=True):
            same(ours, theirs)
    assert not torch.equal(expected[0][1], expected[1][1])


def test_numbers_of_python_are_those_of_the_capture():
    x, lr = on(torch.zeros(2)), 0.5
    graph = torch.accelerator.Graph()
    with graph:
        x += lr
    lr = 3.0
    graph.replay()
    assert x.tolist() == [0.5, 0.5]
    assert lr == 3.0


def test_results_that_are_gone_and_inputs_that_are_only_the_graphs():
    x = on(torch.ones(3))
    total = on(torch.zeros(3))
    graph = torch.accelerator.Graph()
    with graph:
        dropped = x * 3
        total += dropped
    del dropped, x
    gc.collect()
    for i in range(3):
        graph.replay()
        assert total.tolist() == [3.0 * (i + 1)] * 3


def test_memory_of_an_uninitialised_input_and_of_empty_tensors():
    x, nothing = torch.empty(3, device="tpu"), torch.empty(0, device="tpu")
    graph = torch.accelerator.Graph()
    with graph:
        buffer = torch.empty(6, device="tpu")
        buffer[:3] = x
        buffer[3:] = x * 2
        empty = nothing + 1
        nothing.mul_(2)
        joined = torch.cat([buffer, empty])
    x.copy_(torch.arange(3.0))
    for _ in range(2):
        graph.replay()
        assert joined.tolist() == buffer.tolist() == [0, 1, 2, 0, 2, 4]
    assert empty.tolist() == []


def test_writes_that_change_how_an_input_lies():
    a = torch.randn(2, 3, 4, 5)
    x = on(a)
    graph = torch.accelerator.Graph()
    with graph:
        y = (x * 2).sum(1)
    for fill in (
        lambda x, a: x.view(-1).copy_(a.view(-1)),
        lambda x, a: x.view(6, 20).copy_(a.view(6, 20)),
        lambda x, a: x.copy_(a.to(memory_format=torch.channels_last)),
        lambda x, a: x.view(torch.int32).copy_(a.view(torch.int32)),
        lambda x, a: x.untyped_storage().copy_(a.untyped_storage()),
    ):
        a += 1
        fill(x, a)
        graph.replay()
        same(y, (a * 2).sum(1))
        same(x, a)


def test_values_of_jax():
    x = interop.from_jax(interop.to_jax(on(torch.ones(3))))
    graph = torch.accelerator.Graph()
    with graph:
        y = x + 1
        x *= 2
    before = interop.to_jax(x)
    graph.replay()
    assert (y.tolist(), x.tolist(), before.tolist()) == ([2] * 3, [2] * 3, [1] * 3)


def test_graphs_that_share_tensors_and_a_pool():
    x = on(torch.ones(2))
    first = torch.accelerator.Graph()
    with first:
        y = x + 1
    second = torch.accelerator.Graph(pool=first.pool())
    with second:
        x.copy_(y * 2)
    assert second.pool() == first.pool() != torch.accelerator.Graph(pool=(0, 77)).graph_pool
    for _ in range(2):
        first.replay()
        second.replay()
    assert x.tolist() == [10, 10]


def test_checked_ops():
    """An index out of range is found in the replay that has it, and raised by the next read."""
    table, index = on(torch.arange(4.0)), on(torch.tensor([0, 1]))
    graph = torch.accelerator.Graph()
    with graph:
        y = table[index]
        z = nn.functional.embedding(index, table.reshape(4, 1))
    graph.replay()
    assert (y.tolist(), z.flatten().tolist()) == ([0, 1], [0, 1])
    index.copy_(torch.tensor([3, 9]))
    graph.replay()
    with pytest.raises(IndexError, match=r"index 9 is out of bounds .*size 4"):
        y.tolist()
    index.copy_(torch.tensor([3, 2]))
    graph.replay()
    assert (y.tolist(), z.flatten().tolist()) == ([3, 2], [3, 2])


def test_backward_of_a_forward_that_is_captured_apart():
    w = on(torch.randn(3)).requires_grad_()
    x = on(torch.randn(3))
    forward, backward = torch.accelerator.Graph(), torch.accelerator.Graph()
    with forward:
        loss = (w * x).exp().sum()
    with backward:
        loss.backward()
    for _ in range(2):
        new = torch.randn(3)
        x.copy_(new)
        forward.replay()
        backward.replay()
        v = w.detach().cpu().requires_grad_()
        (v * new).exp().sum().backward()
        same(w.grad, v.grad)


def test_streams_and_events_of_a_capture():
    x = on(torch.ones(2))
    side, graph = torch.Stream("tpu"), torch.accelerator.Graph()
    with torch.Stream("tpu") as main, graph:
        y = x + 1
        side.wait_stream(main)
        with side:
            z = y * 2
        event = side.record_event()
        main.wait_event(event)
    graph.replay()
    assert z.tolist() == [4, 4]


def test_other_threads():
    """A capture concerns its own thread; the results of it are none of another's."""
    x, y = on(torch.ones(2)), on(torch.ones(2))
    found: list[object] = []

    def other() -> None:
        found.append((y + 1).tolist())
        found.append(torch.tpu.is_current_stream_capturing())
        try:
            found.append(x.tolist())
        except GraphCaptureError as error:
            found.append(error)

    graph = torch.accelerator.Graph()
    with graph:
        x += 1
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found[:2] == [[2, 2], False]
    assert "being captured" in str(found[2])
    threads = [threading.Thread(target=graph.replay) for _ in range(3)]
    for t in threads:
        t.start()
        t.join()
    assert x.tolist() == [4, 4]


def test_replays_take_one_program():
    x = on(torch.ones(8))
    graph = torch.accelerator.Graph()
    with graph:
        for _ in range(5):
            x.mul_(1.5).add_(1)
    with using(MODES["unbounded"]):
        graph.replay()
        before = torch.tpu.metrics()
        for _ in range(3):
            graph.replay()
        after = torch.tpu.metrics()
    assert after["compiles"] == before["compiles"]
    assert after["executions"] - before["executions"] == 3


def test_debug_dump(tmp_path):
    x = on(torch.ones(2))
    graph = torch.accelerator.Graph()
    graph.enable_debug_mode()
    with graph:
        (x + 1).relu()
    graph.debug_dump(str(tmp_path / "graph.dot"))
    text = (tmp_path / "graph.dot").read_text()
    assert "n0 -> n1" in text
    assert "test_graph_capture.py" in text
    assert "float32[2]" in text


def test_memory_is_given_back():
    x = on(torch.ones(1 << 16))
    graph = torch.accelerator.Graph()
    with graph:
        y = x + 1
    graph.replay()
    _C.drain_references()
    before = torch.tpu.memory_allocated()
    for _ in range(3):
        graph.replay()
    y.cpu()
    _C.drain_references()
    assert torch.tpu.memory_allocated() == before
    del x, y, graph
    gc.collect()
    _C.drain_references()
    assert torch.tpu.memory_allocated() <= before - 2 * 4 * (1 << 16)
