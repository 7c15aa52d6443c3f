"""Sizes that only tensors inside of a graph have: a program serves a bucket of them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tpu_core.metrics import METRICS

Function = Callable[[torch.Tensor, int], torch.Tensor]


pytestmark = pytest.mark.usefixtures("poison")


def blurred(x: torch.Tensor, n: int) -> torch.Tensor:
    weight = torch.linspace(-1, 1, 75, device=x.device).view(5, 5, 3)
    y = F.conv1d(x.T[None], weight, stride=2, padding=1).relu()
    return F.max_pool1d(y, 2).mean()


FUNCTIONS: dict[str, Function] = {
    "convolution": blurred,
    "every second": lambda x, n: x[::2].exp().sum(0) + x[1::3].sum(0),
    "windows": lambda x, n: x.unfold(0, 4, 3).amax(2).sum(),
    "halves": lambda x, n: (x[: len(x) // 2] * x[len(x) - len(x) // 2 :]).sum(),
    "middle": lambda x, n: x[len(x) // 2] * x[len(x) // 3].sum(),
    "median": lambda x, n: x.sort(0).values[(len(x) - 1) // 2],
    "rows of eight": lambda x, n: F.pad(x, (0, 0, 0, -len(x) % 8)).view(-1, 8, 5).amax(1).sum(),
    "resized": lambda x, n: F.interpolate(x.T[None], size=n, mode="linear").tanh().sum(),
    "resized to the size before": lambda x, n: F.interpolate(
        F.avg_pool1d(x.T[None], 3), size=len(x), mode="linear", align_corners=True
    ).sum(),
    "spectrum": lambda x, n: torch.fft.rfft(x, dim=0).abs().mean(0),
    "ones": lambda x, n: torch.ones(n, device=x.device).cumsum(0).mean() * x,
    "identity": lambda x, n: torch.eye(n + 2, device=x.device).sum() + x.sum(0),
    "repeated": lambda x, n: x.repeat(n, 1).tanh().mean(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_program_serves_a_bucket(name: str) -> None:
    function, draw = FUNCTIONS[name], random.Random(1)
    compiled = torch.compile(function, dynamic=True)
    before = METRICS.snapshot()
    for _ in range(9):
        x, n = torch.randn(draw.randrange(9, 64), 5), draw.randrange(2, 40)
        found = []
        for device, of in (("cpu", function), ("tpu", compiled)):
            given = x.to(device).detach().requires_grad_()
            y = of(given, n)
            y.sum().backward()
            found.append((y.detach().cpu(), given.grad.cpu()))
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    # Two graphs, each as it was first recorded and for two buckets of each of its sizes.
    assert METRICS.delta(before)["compiles"] <= 8


def test_an_integer_below_zero_has_a_program_of_its_own() -> None:
    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        return F.pad(x, (0, n)).sum(0) * torch.ones(abs(n), device=x.device).sum()

    compiled = torch.compile(function, dynamic=True)
    for n in (3, -2, 4, -1, 0, 2, -3):
        x = torch.randn(4, 6)
        torch.testing.assert_close(compiled(x.to("tpu"), n).cpu(), function(x, n))


def test_equal_ratios_are_no_program_of_their_own() -> None:
    def resized(x: torch.Tensor, size: int) -> torch.Tensor:
        return F.interpolate(x, size=(size, size), mode="bilinear").tanh().sum()

    compiled, before = torch.compile(resized, dynamic=True), METRICS.snapshot()
    for shape, n in (((5, 7), 9), ((6, 9), 11), ((6, 6), 9), ((7, 5), 9), ((7, 7), 12)):
        x = torch.randn(1, 2, *shape)
        torch.testing.assert_close(compiled(x.to("tpu"), n).cpu(), resized(x, n))
    assert METRICS.delta(before)["compiles"] <= 3
