"""Debug, Strict and Fused: the same results, other cuts."""

from __future__ import annotations

import pytest
import torch

from tpu_core import _C
from tpu_core.errors import ConfigurationError, NonFiniteError
from tpu_core.modes import find


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def trained(device: str) -> tuple[list[torch.Tensor], torch.nn.Module]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    x = torch.randn(6, 8)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        step(model, optimizer, x.to(device))
    return [p.detach().cpu() for p in model.parameters()], model


@pytest.mark.parametrize("mode", ["debug", "strict", "fused"])
def test_training_agrees_with_the_cpu(mode: str) -> None:
    with torch.tpu.set_eager_mode(mode):
        got, _ = trained("tpu")
    want, _ = trained("cpu")
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


def test_fused_runs_a_training_step_as_one_program() -> None:
    with torch.tpu.set_eager_mode("fused"):
        _, model = trained("tpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(6, 8).to("tpu")
        for _ in range(3):
            step(model, optimizer, x)
        before = _C.counters()["executions"], torch.tpu.metrics()["compiles"]
        for _ in range(5):
            step(model, optimizer, x)
        after = _C.counters()["executions"], torch.tpu.metrics()["compiles"]
    assert (after[0] - before[0], after[1] - before[1]) == (5, 0)


def test_strict_runs_each_op_alone() -> None:
    with torch.tpu.set_eager_mode("strict"):
        x = torch.ones(5, device="tpu")
        x.add(1)
        before = _C.counters()["executions"]
        y = x.add(1).add(2).add(3)
        assert _C.counters()["executions"] - before == 3
    assert y.tolist() == [7.0] * 5


def test_modes_nest_and_return() -> None:
    outer = torch.tpu.eager_mode
    with torch.tpu.set_eager_mode("strict"):
        with torch.tpu.set_eager_mode("debug"):
            assert torch.tpu.eager_mode == "debug"
        assert torch.tpu.eager_mode == "strict"
    assert torch.tpu.eager_mode == outer


def test_unknown_mode_lists_what_there_is() -> None:
    with pytest.raises(ConfigurationError, match="debug, fused, strict"):
        find("lazy")


def test_changing_numbers_compile_nothing() -> None:
    with torch.tpu.set_eager_mode("fused"):
        x = torch.ones(4, device="tpu")
        cache = torch.zeros(3, 10, device="tpu")

        def work(i: int) -> None:
            cache[:, i] = x[:3] * (0.37 * i + 2.5)
            _C.flush("test")

        for i in range(3):
            work(i)
        before = torch.tpu.metrics()["compiles"]
        for i in range(3, 10):
            work(i)
        assert torch.tpu.metrics()["compiles"] == before
        assert cache[0].tolist() == pytest.approx([0.37 * i + 2.5 for i in range(10)])


def test_debug_names_the_line_of_a_nan() -> None:
    from tpu_core.config import override

    with override(debug_nans=True), torch.tpu.set_eager_mode("debug"):
        x = torch.tensor([1.0, -1.0]).to("tpu")
        with pytest.raises(NonFiniteError, match=r"aten\.log") as raised:
            torch.log(x)  # the line
    assert "test_modes.py" in str(raised.value)
