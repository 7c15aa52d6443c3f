"""Errors that follow from values: programs find them, and the next read raises the CPU's error."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

import interpreter
from checked_calls import FINE, INDICES, OTHERS, outcome
from tpu_core import _C
from tpu_core.pjrt.padded_array import PaddedArray
from tpu_core.recorder import checked

i = torch.tensor


@pytest.fixture
def everything() -> Iterator[None]:
    """Each check on the list."""
    torch.zeros(1, device="tpu")
    checked.switch("all")
    yield
    _C.flush()
    checked.switch("default")


@pytest.fixture(params=["strict", "segments"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    with torch.tpu.set_eager_mode(request.param):
        yield request.param


@pytest.mark.parametrize("name", INDICES)
def test_errors_of_the_cpu(name: str, mode: str):
    call = INDICES[name]
    expected = outcome(call, "cpu")
    assert expected != "fine"
    assert outcome(call, "tpu") == expected
    assert outcome(call, "tpu") == expected  # by a program that is there already


@pytest.mark.parametrize("name", OTHERS)
def test_errors_of_the_cpu_that_take_more(name: str, mode: str, everything: None):
    call = OTHERS[name]
    expected = outcome(call, "cpu")
    assert expected != "fine"
    assert outcome(call, "tpu") == expected


@pytest.mark.parametrize("name", FINE)
def test_nothing_is_wrong(name: str, mode: str, everything: None):
    assert outcome(FINE[name], "cpu") == "fine"
    assert outcome(FINE[name], "tpu") == "fine"


def test_levels():
    division = OTHERS["floor_divide"]
    assert outcome(division, "tpu") == "fine"
    try:
        checked.switch("off")
        assert outcome(INDICES["index"], "tpu") == "fine"
        checked.switch("all")
        assert outcome(division, "tpu") == "RuntimeError: ZeroDivisionError"
    finally:
        checked.switch("default")
    assert outcome(INDICES["index"], "tpu").startswith("IndexError")
    assert outcome(division, "tpu") == "fine"


def test_the_line_and_what_comes_after(mode: str):
    x = torch.arange(5.0, device="tpu")
    y = x[i([1, 7]).to("tpu")] + 1  # the mistake
    z = x * 2
    with pytest.raises(IndexError, match="index 7 is out of bounds") as caught:
        z.cpu()
    text = "".join(traceback.format_exception(caught.value))
    assert "in aten.index.Tensor(float32[5], int64[2]) at " in text
    line = text.split(" at ")[-1].split(" in ")[0].rpartition(":")[2]
    with open(__file__) as source:
        assert "# the mistake" in source.readlines()[int(line) - 1]
    assert torch.equal(z.cpu(), torch.arange(5.0) * 2)  # once is enough
    assert y.cpu()[0] == 2
    assert torch.equal(x[i([1, 4]).to("tpu")].cpu(), torch.tensor([1.0, 4.0]))


def test_a_synchronize_and_an_event_raise(mode: str):
    x = torch.arange(5.0, device="tpu")
    index = i([1, 7]).to("tpu")
    y = x[index]
    with pytest.raises(IndexError):
        torch.tpu.synchronize()
    torch.tpu.synchronize()
    y = x[index] * 2
    event = torch.tpu.Event()
    event.record()
    with pytest.raises(IndexError):
        event.synchronize()
    del y


def test_a_read_of_what_is_older_raises_nothing(mode: str):
    x = torch.arange(5.0, device="tpu")
    before = x + 1
    torch.tpu.synchronize()
    y = x[i([1, 7]).to("tpu")]
    _C.flush()
    assert before.cpu().sum() == 15
    with pytest.raises(IndexError):
        y.cpu()


def test_a_result_that_nobody_reads_is_checked(mode: str):
    x = torch.arange(5.0, device="tpu")
    x[i([1, 7]).to("tpu")]
    with pytest.raises(IndexError):
        (x + 1).cpu()


def test_the_first_of_several(mode: str):
    x = torch.arange(5.0, device="tpu")
    total = torch.zeros((), device="tpu")
    for k in range(100):
        total = total + x[i([1, 4 if k < 60 else k]).to("tpu")].sum()
    with pytest.raises(IndexError, match="index 60 is out of bounds"):
        total.item()
    assert total.item() > 0


def test_words_do_not_pile_up():
    x = torch.arange(5.0, device="tpu")
    index = i([1, 2]).to("tpu")
    before = torch.tpu.memory_allocated()
    for _ in range(500):
        y = x[index]
    torch.tpu.synchronize()
    del y
    _C.drain_references()
    assert torch.tpu.memory_allocated() - before <= 512


def test_one_output_more_and_no_read_more():
    x = torch.arange(5.0, device="tpu")
    with torch.tpu.set_eager_mode("segments"):
        x[i([1, 2]).to("tpu")].cpu()
        torch.tpu.reset_metrics()
        for _ in range(3):
            y = x[i([1, 2]).to("tpu")]
            z = x[i([3, 0]).to("tpu")]
            (y + z).cpu()
        assert torch.tpu.metrics()["host_syncs"] == 3
        assert torch.tpu.metrics()["executions"] == 3


def test_a_backward(mode: str):
    weight = torch.ones(4, 3, device="tpu", requires_grad=True)
    loss = F.cross_entropy(weight[i([0, 9]).to("tpu")], i([0, 1]).to("tpu"))
    loss.backward()
    with pytest.raises(IndexError, match="index 9 is out of bounds for dimension 0 with size 4"):
        loss.item()
    assert weight.grad is not None


def test_memory_is_still_lent():
    """An update in place copies nothing, although its program has an output more."""
    x = torch.zeros(1 << 20, device="tpu")
    index = i([1, 2]).to("tpu")
    torch.tpu.synchronize()
    for _ in range(2):
        x[index] += 1
        torch.tpu.synchronize()
        torch.tpu.reset_peak_memory_stats()
        before = torch.tpu.memory_allocated()
        x[index] += 1
        torch.tpu.synchronize()
        assert torch.tpu.max_memory_allocated() - before < 1 << 20


CODE = """
import torch
x = torch.arange(6.0).to("tpu")
for k in (2, 9):
    try:
        print(x[torch.tensor([1, k]).to("tpu")].sum().item())
    except IndexError as error:
        print(error)
print(torch.tpu.metrics()["compiles"])
"""


def test_a_warm_start(tmp_path):
    folder = {"TPU_CACHE_DIR": str(tmp_path), "TPU_TIERS": "compiled"}
    lines = "3.0\nindex 9 is out of bounds for dimension 0 with size 6\n"
    for mode in ("strict", "segments"):
        first = interpreter.clean(CODE, **folder, TPU_EAGER_MODE=mode)
        assert first.startswith(lines) and not first.endswith("\n0\n")
        assert interpreter.clean(CODE, **folder, TPU_EAGER_MODE=mode) == lines + "0\n"
        # The setting is part of a program's key.
        other = interpreter.clean(CODE, **folder, TPU_EAGER_MODE=mode, TPU_CHECKS="off")
        assert other.startswith("3.0\n6.0\n") and not other.endswith("\n0\n")


def test_after_promotion_to_programs(restless: None):
    x = torch.arange(12.0, device="tpu").reshape(4, 3)

    def step(k: int) -> float:
        y = x[i([1, k]).to("tpu")].relu()
        return (y * 2 + F.cross_entropy(x, i([0, 1, 2, k % 3]).to("tpu"))).sum().item()

    with torch.tpu.set_eager_mode("segments"):
        for _ in range(6):
            step(3)
        before = torch.tpu.metrics()
        for _ in range(3):
            with pytest.raises(IndexError, match="index 4 is out of bounds for dimension 0"):
                step(4)
            step(3)
        after = torch.tpu.metrics()
    assert after["promotions"] > 0
    assert after["executions"] - before["executions"] >= 4  # no CPU kernel raised


def test_words_that_are_not_on_the_host():
    words = [jnp.array([0, 0]), PaddedArray(jnp.array([[3, 7, 0]])[0], (2,))]
    assert checked.read(words) == [(0, 0), (3, 7)]


@pytest.mark.parametrize("mode", ["strict", "segments"])
def test_an_error_that_no_read_raised_is_warned_of_at_exit(mode: str):
    result = interpreter.run(
        """
        import torch

        w = torch.zeros(5, device="tpu", requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.1)
        for k in (2, 3, 7, 4):
            optimizer.zero_grad()
            loss = w[torch.tensor([1, k]).to("tpu")].sum()
            loss.backward()
            optimizer.step()
            if k == 2:
                print(loss.item())
        """,
        TPU_TIERS="compiled",
        TPU_EAGER_MODE=mode,
    )
    assert (result.returncode, result.stdout) == (0, "0.0\n")
    assert "UnreadErrorWarning" in result.stderr
    assert "IndexError: index 7 is out of bounds for dimension 0 with size 5" in result.stderr
    assert "in aten.index.Tensor(float32[5], int64[2]) at <string>:8" in result.stderr
