"""Windows and shifts that differ in each step are inputs of one program."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from compile_counts import compiles
from tpu_core import modes


@pytest.fixture(autouse=True)
def fused():
    with modes.using("fused"):
        yield


def test_writes_of_random_lengths():
    draw = random.Random(0)

    def step(_: int) -> None:
        x, y = torch.randn(3, 20, 24), torch.randn(3, 20, 24)
        (a, b), (c, d) = (sorted(draw.sample(range(n), 2)) for n in (21, 25))
        on_device, other = x.to("tpu"), y.to("tpu")
        x[:, a:b, c:d] = y[:, a:b, c:d]
        on_device[:, a:b, c:d] = other[:, a:b, c:d]
        torch.testing.assert_close(on_device.cpu(), x, rtol=0, atol=0)

    compiles(step, range(40))
    assert compiles(step, range(10)) <= 2


@pytest.mark.parametrize("width", [2, 6])
def test_padding_of_a_varying_length_in_front_that_may_be_negative(width):
    x = torch.arange(1.0, 2 * width + 1).view(2, width)
    for before in (1, 3, -1, 2, 0, -2, 5, 1 - width):
        for after in (2, 0):
            expected = F.pad(x, (before, after), value=7.0)
            padded = F.pad(x.to("tpu"), (before, after), value=7.0)
            torch.testing.assert_close(padded.cpu(), expected, rtol=0, atol=0)


def test_a_window_at_the_end_stays_there():
    for n in (5, 9, 6, 12, 11, 7):
        x, on_device = torch.zeros(13, 2), torch.zeros(13, 2, device="tpu")
        row = torch.randn(n, 2)
        x[13 - n :] = row
        on_device[13 - n :] = row.to("tpu")
        torch.testing.assert_close(on_device.cpu(), x, rtol=0, atol=0)


def test_shifts_are_inputs():
    x = torch.arange(35.0).view(5, 7)

    def step(i: int) -> None:
        shifts = (i - 9, 3 * i)
        rolled = torch.roll(x.to("tpu"), shifts, (0, 1))
        torch.testing.assert_close(rolled.cpu(), torch.roll(x, shifts, (0, 1)), rtol=0, atol=0)

    compiles(step, range(1))
    assert compiles(step, range(1, 20)) == 0


def test_gradient_of_a_roll():
    for shift in (2, -3, 1, 40):
        x = torch.randn(6, 5, requires_grad=True)
        y = x.detach().to("tpu").requires_grad_()
        for t in (x, y):
            (torch.roll(t, shift, 0) * torch.arange(5.0, device=t.device)).square().sum().backward()
        torch.testing.assert_close(y.grad.cpu(), x.grad)
