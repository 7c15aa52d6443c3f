"""Arguments that are sizes, and that vary beside those of tensors."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from against_cpu import value_and_gradients
from compile_counts import compiles
from tpu_core import modes

pytestmark = pytest.mark.usefixtures("signatures", "poison")


@pytest.fixture(autouse=True)
def fused():
    with modes.using("fused"):
        yield


def less(x: torch.Tensor, m: int) -> int:
    """What a tensor lacks, but no more than it has."""
    return min(m, x.shape[1] - 1, m - x.shape[1])


# Functions of sequences, and of another length, which is the larger one.
BY_A_DIFFERENCE = {
    "behind": lambda x, m: F.pad(x, (0, 0, 0, m - x.shape[1])) * 2,
    "in front": lambda x, m: F.pad(x, (0, 0, m - x.shape[1], 0), value=3.0).exp(),
    "behind a half": lambda x, m: F.pad(x[:, 1::2], (0, 0, 0, m - x.shape[1] // 2)).cos(),
    "on both sides": lambda x, m: F.pad(
        x, (0, 0, (m - x.shape[1]) // 2, m - x.shape[1] - (m - x.shape[1]) // 2)
    ).flip(1),
    "zeros behind": lambda x, m: torch.cat([x, x.new_zeros(len(x), m - x.shape[1], 3)], 1).cos(),
    "by more and by less": lambda x, m: F.pad(x, (0, 0, 0, m // 2 - x.shape[1])).sin(),
    "reflected": lambda x, m: F.pad(x.mT, (less(x, m), 0), mode="reflect") * 2,
    "replicated": lambda x, m: F.pad(x.mT, (0, m - x.shape[1]), mode="replicate") * 2,
    "circular": lambda x, m: F.pad(x.mT, (less(x, m), 0), mode="circular") * 2,
    "spectra": lambda x, m: torch.fft.irfft(torch.fft.rfft(x.mT)[..., : m // 8 + 1], n=m),
    "repeated": lambda x, m: x.repeat(1, m - x.shape[1], 1).sum(1),
    "steps": lambda x, m: x * torch.linspace(0, 1, m - x.shape[1], device=x.device).square().mean(),
}


@pytest.mark.parametrize("name", BY_A_DIFFERENCE)
def test_differences_of_sizes(name: str) -> None:
    function, draw = BY_A_DIFFERENCE[name], random.Random(7)

    def step(_: int) -> None:
        x, m = torch.randn(3, draw.randint(4, 20), 3), draw.randint(23, 50)
        here, there = (
            value_and_gradients(lambda x: function(x, m), [x], d) for d in ("cpu", "tpu")
        )
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)

    # Forward and backward are a program each for some pairs of buckets.
    assert compiles(step, range(14)) <= 12
    assert compiles(step, range(10)) <= 3


def test_an_argument_beside_equal_sizes() -> None:
    """The third of 5 and of 6 elements, so that it looks as if it were always the third."""
    for n in (5, 6, 11, 9, 13, 10):
        x = torch.randn(n, 4)
        for k in ((n + 1) // 2, n, n // 3, 1):
            have = x.to("tpu").kthvalue(k, 0).values * 2
            assert torch.equal(have.cpu(), x.kthvalue(k, 0).values * 2)


def test_no_padding_and_one_element_of_it() -> None:
    """Values that a program of several sizes does not take, among others that it does."""
    draw = random.Random(3)
    for _ in range(12):
        n = draw.randint(3, 20)
        for more in (draw.randint(2, 9), 0, 1, -1, -2):
            x = torch.randn(2, n)
            have = F.pad(x.to("tpu"), (0, more), value=1.5) * 2
            assert torch.equal(have.cpu(), F.pad(x, (0, more), value=1.5) * 2)
