"""Several threads at once: values passed between them, backward and checkpointing from any."""

from __future__ import annotations

import contextvars
import copy
import functools
import queue
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tpu_core import _C, modes


@pytest.fixture(params=modes.names())
def mode(request):
    before = torch.tpu.eager_mode
    torch.tpu.eager_mode = request.param  # of every thread
    yield request.param
    torch.tpu.eager_mode = before


def run_all(*functions: Callable[[], object], timeout: float = 60) -> None:
    """Run functions in threads of their own; raises what they raise."""
    errors: list[BaseException] = []

    def guard(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guard, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]


def ping_pong(rounds: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Two functions that record ops on each other's unfinished results."""
    there: queue.Queue[torch.Tensor] = queue.Queue()
    back: queue.Queue[torch.Tensor] = queue.Queue()

    def one() -> None:
        for i in range(rounds):
            x = torch.full((4,), float(i), device="tpu") + 1
            there.put(x)
            y = back.get(timeout=60) - x
            assert y.tolist() == [i + 1.0] * 4

    def other() -> None:
        for _ in range(rounds):
            x = there.get(timeout=60)
            back.put(x.clone().mul_(2))

    return one, other


def train(net: torch.nn.Module, device: str, reentrant: bool | None = None) -> list[float]:
    """Losses of a few steps of a copy of ``net``, checkpointed unless ``reentrant`` is None."""
    net = copy.deepcopy(net).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    x = torch.linspace(-1, 1, 8, device=device).reshape(2, 4).requires_grad_()
    losses = []
    for _ in range(3):
        y = net(x) if reentrant is None else checkpoint(net, x, use_reentrant=reentrant)
        loss = y.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def trainer(reentrant: bool | None) -> Callable[[], None]:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    expected = train(net, "cpu", reentrant)

    def run() -> None:
        losses = train(net, "tpu", reentrant)
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)

    return run


def test_threads_that_share_an_input_record_what_one_thread_records(mode):
    weight = torch.arange(4.0).to("tpu")
    turns = threading.Barrier(2)

    def work(wait: Callable[[], object] = lambda: None) -> None:
        scaled = weight * 2
        wait()  # the other thread's trace reads the weight, too
        total = scaled + weight
        wait()
        assert total.tolist() == [0, 3, 6, 9]

    run_all(work)
    with torch.tpu.no_recompile():
        run_all(*[functools.partial(work, lambda: turns.wait(60))] * 2)


def test_values_pass_between_threads(mode):
    run_all(*ping_pong(10))


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_backward_in_another_thread(mode, reentrant):
    run_all(trainer(reentrant))


def test_backward_of_another_threads_graph(mode):
    x = torch.ones(3, device="tpu", requires_grad=True)
    loss = (x * 2).square().sum()
    run_all(loss.backward)
    assert x.grad.tolist() == [8.0] * 3


def test_a_thread_without_ops_of_its_own_leaves_the_engine_alone(mode):
    x = torch.ones(3, device="tpu", requires_grad=True)
    run_all((x * 2).sum().backward)
    # The engine's thread still joins the trace of whoever calls backward next.
    before = torch.tpu.metrics()["segments"]
    x.grad = None
    (x * 3).sum().backward()
    if mode == "segments":
        assert torch.tpu.metrics()["segments"] == before
    assert x.grad.tolist() == [3.0] * 3


def test_an_error_in_one_thread_leaves_the_others_alone(mode):
    def wrong() -> None:
        for _ in range(5):
            with pytest.raises(RuntimeError, match="must match the size"):
                torch.ones(3, device="tpu") + torch.ones(4, device="tpu")

    run_all(wrong, *ping_pong(5))


def test_a_mode_is_the_threads_own():
    seen = []

    def other() -> None:
        with torch.tpu.set_eager_mode("strict"):
            entered.set()
            left.wait(60)
            seen.append(torch.tpu.eager_mode)

    entered, left = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)
    mine = next((m for m in modes.names() if m != "strict"), "strict")
    with torch.tpu.set_eager_mode(mine):
        thread.start()
        entered.wait(60)
        assert torch.tpu.eager_mode == mine
    left.set()
    thread.join(60)
    assert seen == ["strict"]


def stress(seconds: float) -> None:
    end = time.monotonic() + seconds

    def until_then(function: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            while time.monotonic() < end:
                function()

        return run

    def pairs() -> None:
        while time.monotonic() < end:
            run_all(*ping_pong(3))

    def synchronizer() -> None:
        while time.monotonic() < end:
            torch.tpu.synchronize()
            torch.tpu.memory_allocated()
            time.sleep(0.05)

    def in_place() -> None:
        total = torch.zeros(4, device="tpu")
        for i in range(20):
            total[i % 4 : i % 4 + 1].add_(1)
        assert total.tolist() == [5.0] * 4

    trainers = [until_then(trainer(reentrant)) for reentrant in (None, True, False)]
    run_all(pairs, synchronizer, until_then(in_place), *trainers, timeout=seconds + 90)


def test_stress(mode):
    stress(2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stress_for_long(mode):
    stress(20)


def test_the_end_waits_for_what_autograds_threads_still_hold():
    # A thread of autograd that is the last owner of a backward needs the GIL to drop what it holds.
    # At the interpreter's end that would abort the process, so there it is waited for.
    held: contextvars.ContextVar[object] = contextvars.ContextVar("held")
    begun, dropped = threading.Event(), threading.Event()

    class Slow:
        def __del__(self) -> None:
            if threading.current_thread() is not main:
                begun.set()
                time.sleep(0.3)
                dropped.set()

    main = threading.current_thread()
    w = torch.ones(3, device="tpu", requires_grad=True)

    def backward() -> None:
        held.set(Slow())
        (w * 2).sum().backward()

    # Which thread is last is a matter of microseconds.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        # On torch 2.11 no thread of autograd has been seen to be the last.
        is_old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
        deadline = time.monotonic() + (5 if is_old else 120)
        while not begun.is_set() and time.monotonic() < deadline:
            contextvars.copy_context().run(backward)
    finally:
        sys.setswitchinterval(interval)
    if is_old and not begun.is_set():
        # The race that the test is about did not come about in 120 s there, so nothing is shown.
        pytest.skip("torch 2.11: no thread of autograd was the last owner of a backward")
    assert begun.is_set()
    _C.wait_for_autograd()
    assert dropped.is_set()
