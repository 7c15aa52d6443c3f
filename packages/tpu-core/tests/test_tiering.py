"""Segments that go over from CPU kernels to programs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import interpreter
from aliasing.programs import Program
from tpu_core import _C, modes
from tpu_core.metrics import METRICS

pytestmark = pytest.mark.usefixtures("restless")


@pytest.fixture(autouse=True)
def segments() -> object:
    with modes.using("segments"):
        yield


def trained(device: str, batches: list[int], branch: Callable[[int], bool]) -> list[float]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(4)
    losses = []
    for step, size in enumerate(batches):
        x = torch.randn(size, 8, generator=generator).to(device)
        y = torch.randint(4, (size,), generator=generator).to(device)
        loss = F.cross_entropy(model(x), y)
        if branch(step):  # another segment than was expected
            loss = loss + 1e-2 * sum(p.square().sum() for p in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters()):
                a.lerp_(p, 0.1)
        losses.append(loss.item())
    return [*losses, *(p.sum().item() for p in average.parameters())]


def test_a_loop_goes_over_and_stays_right() -> None:
    before = METRICS.snapshot()
    batches = [16] * 12
    ours = trained("tpu", batches, lambda step: False)
    made = METRICS.delta(before)
    assert made["promotions"] >= 1
    assert made["executions"] >= 6
    assert_close(ours, trained("cpu", batches, lambda step: False), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("every", [2, 3, 5])
def test_segments_that_were_not_expected(every: int) -> None:
    batches = [16] * 14
    f = lambda step: step % every == every - 1  # noqa: E731
    assert_close(trained("tpu", batches, f), trained("cpu", batches, f), rtol=1e-4, atol=1e-5)


def test_sizes_that_do_not_come_again_are_never_compiled() -> None:
    before = METRICS.snapshot()
    batches = list(range(40, 52))  # sizes of no other test, whose segments are remembered
    ours = trained("tpu", batches, lambda step: False)
    # The weights' average has one size: it may go over.
    made = METRICS.delta(before)
    assert made["host_ops"] > 12 * 20
    assert made["promotions"] <= 1
    assert_close(ours, trained("cpu", batches, lambda step: False), rtol=1e-4, atol=1e-5)


def test_random_programs_of_views_and_writes() -> None:
    """Each three times: by kernels, by kernels once more, and by what was learned from that."""
    before = METRICS.snapshot()
    for seed in range(40):
        for _ in range(4):
            Program.of_seed(seed).run()
    assert METRICS.delta(before)["promotions"] > 5


def test_draws_go_on_across_the_tiers() -> None:
    torch.manual_seed(6)
    drawn = []
    for _ in range(8):
        x = torch.rand(5, device="tpu")
        drawn.append((x * 2).cpu())
    _C.flush()
    _C.set_tiers(0)
    torch.manual_seed(6)
    expected = [(torch.rand(5, device="tpu") * 2).cpu() for _ in range(8)]
    for ours, theirs in zip(drawn, expected):
        assert torch.equal(ours, theirs)


def test_an_error_in_a_program_that_was_expected_is_the_ops() -> None:
    x = torch.ones(4, device="tpu")
    for _ in range(6):
        ((x + 1) * 2).cpu()
    with pytest.raises(RuntimeError, match="must match the size"):
        (x + 1) * torch.ones(3, device="tpu")
    assert ((x + 1) * 2).tolist() == [4.0] * 4


def test_gradients_are_computed_in_the_thread_that_asks() -> None:
    code = """
        import threading
        import torch

        x = torch.ones(3, device="tpu", requires_grad=True)
        threads = []
        y = x * 2
        y.register_hook(lambda gradient: threads.append(threading.current_thread()))
        y.sum().backward()
        print(threads == [threading.main_thread()], x.grad.tolist())
    """
    assert interpreter.clean(code, TPU_TIERS="auto") == "True [2.0, 2.0, 2.0]\n"
    assert interpreter.clean(code, TPU_TIERS="compiled") == "False [2.0, 2.0, 2.0]\n"


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_what_compiles_took_is_expected_of_the_next(seconds: float) -> None:
    code = f"""
        import torch
        from tpu_core import _C

        x = torch.ones(4, device="tpu")
        _C.note_compile(1, 1, {seconds})
        for _ in range(16):
            (x * 2 + 1).cpu()
        print(torch.tpu.metrics()["promotions"])
    """
    made = interpreter.clean(code, TPU_TIERS="auto", TPU_TIER_PATIENCE="1e-6")
    assert made == ("0\n" if seconds else "1\n")


def test_tiers_change_where_the_environment_is_read_again() -> None:
    code = """
        import os, torch
        from tpu_core import config

        def host_ops():
            before = torch.tpu.metrics()["host_ops"]
            (torch.ones(3, device="tpu") * 2).tolist()
            return torch.tpu.metrics()["host_ops"] - before

        seen = []
        for name in ("host", "compiled", "host"):
            os.environ["TPU_TIERS"] = name
            config.reload()
            seen.append((host_ops() > 0, torch.autograd.is_multithreading_enabled()))
        print(seen)
    """
    assert interpreter.clean(code) == "[(True, False), (False, True), (True, False)]\n"


def test_waiting_is_no_work_that_a_program_would_save() -> None:
    code = """
        import time
        import torch

        def slow(x):  # as on a machine whose cores do other work
            time.sleep(0.1)
            return x - x.trunc()

        library = torch.library.Library("aten", "IMPL")
        library.impl("frac", slow, "CPU")
        x = torch.ones(4, device="tpu")
        for _ in range(16):
            torch.frac(x * 2).cpu()
        print(torch.tpu.metrics()["promotions"])
    """
    made = interpreter.run(code, TPU_TIERS="auto", TPU_TIER_PATIENCE="1")
    assert (made.returncode, made.stdout) == (0, "0\n"), made.stderr
