"""Numbers are inputs of programs: those in lists, and those that are constants until they vary."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from storage_tools import WHOLE, programs
from tpu_core import modes
from tpu_core.recorder.op_schema import alike

INPUTS = [torch.linspace(-1, 1, n) for n in (4, 4, 6)]


def multiply(inputs: list[torch.Tensor], numbers: list[Any]) -> None:
    """``_foreach_mul`` by a list, on the device as on the CPU."""
    with modes.using(WHOLE):
        ours = torch._foreach_mul(inputs, numbers)
        ours = [t.cpu() for t in ours]
    theirs = torch._foreach_mul(INPUTS, numbers)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_one_number_several_times_is_one_input() -> None:
    inputs = [x.to("tpu") for x in INPUTS]
    with programs() as made:
        multiply(inputs, [0.3, 0.3, 0.3])
        assert made() == 1
        for x in (0.7, -2.5, math.inf, math.nan):
            multiply(inputs, [x] * 3)
        assert made() == 1
        multiply(inputs, [0.3, 0.4, 0.3])
        assert made() == 2
        for numbers in ([0.5, 0.6, 0.7], [1.5, 1.5, 0.2], [math.nan, 3.0, 4.0]):
            multiply(inputs, numbers)
        multiply(inputs, [0.9, 0.9, 0.9])
        assert made() == 2


@pytest.mark.parametrize(
    "numbers",
    [[2, 2, 2], [2, 2.0, 2], [True, True, True], [True, 1, 1], [0.0, -0.0, 0.0], [2.5 + 1j] * 3],
    ids=str,
)
def test_lists_of_any_numbers(numbers: list[Any]) -> None:
    multiply([x.to("tpu") for x in INPUTS], numbers)


def test_what_counts_as_one_number() -> None:
    assert alike([0.1, 0.1]) and alike([3, 3, 3]) and alike([math.nan, math.nan])
    for values in ([0.1], [], [1, 1.0], [True, True], [0.0, -0.0], [1, 2], [1j, 1j]):
        assert not alike(values)


def test_steps_of_an_optimizer_that_drift_apart() -> None:
    """Parameters that join later have other step sizes than the first."""

    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [torch.randn(5, 3).to(device).requires_grad_() for _ in range(3)]
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        for i in range(6):
            optimizer.zero_grad()
            sum((p**2).sum() for p in parameters[: 2 + (i >= 3)]).backward()
            optimizer.step()
        return [p.detach().cpu() for p in parameters]

    for a, b in zip(train("tpu"), train("cpu"), strict=True):
        torch.testing.assert_close(a, b)


def test_a_normalisations_eps_becomes_an_input_once_it_varies() -> None:
    x, weight = torch.randn(6, 5), torch.randn(5)
    ours = x.to("tpu"), weight.to("tpu")
    torch.tpu.synchronize()

    def normalise(eps: float) -> None:
        with modes.using(WHOLE):
            y = torch.nn.functional.layer_norm(ours[0], (5,), ours[1], None, eps).cpu()
        torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (5,), weight, None, eps))

    with programs() as made:
        normalise(1e-5)
        normalise(1e-5)
        assert made() == 1
        for eps in (0.1, 0.7, 3.0, 1e-5):
            normalise(eps)
        assert made() == 2


def test_batch_norm_with_a_cumulative_average() -> None:
    """Its momentum, ``1 / batches``, is another number at each step."""

    def run(device: str) -> list[torch.Tensor]:
        x = torch.linspace(-1, 2, 24).reshape(4, 3, 2).to(device)
        mean, variance = torch.zeros(3, device=device), torch.ones(3, device=device)
        for i in range(1, 6):
            torch.nn.functional.batch_norm(x * i, mean, variance, training=True, momentum=1 / i)
        return [mean.cpu(), variance.cpu()]

    theirs = run("cpu")
    with modes.using(modes.STRICT), programs() as made:
        ours = run("tpu")
        assert made() <= 8
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:.*resized:UserWarning", "ignore:.*out tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.range:UserWarning")
@pytest.mark.parametrize("op", ["arange", "range", "fft_fftfreq", "fft_rfftfreq"])
def test_numbers_that_decide_a_length_resize_out_tensors(op: str) -> None:
    overload = getattr(torch.ops.aten, op)
    calls = {
        "arange": [(2,), (3,), (1,), (3.0,), (0, 2), (1, 5, 2)],
        "range": [(0, 2), (0, 3), (1, 1), (0, 4, 2), (0, 6, 2)],
    }.get(op, [(2, 2.0), (3, 0.5), (3, 0.25), (1, 0.25), (4, 0.25)])
    results = []
    for device in ("cpu", "tpu"):
        out = torch.zeros(0, device=device)
        results.append([overload(*c, out=out).cpu().clone() for c in calls])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.usefixtures("every_tier")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_whole_quotients_by_a_number_on_the_cpu(dtype: torch.dtype) -> None:
    x, by = torch.tensor([7, -7, 5]).to(dtype), torch.tensor(2).to(dtype)
    y = x.to("tpu")
    assert torch.equal((y // by).cpu(), x // by)
    assert torch.equal((by // y).cpu(), by // x)
    y //= by
    assert torch.equal(y.cpu(), x // by)
