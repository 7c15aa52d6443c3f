"""Sequences of other lengths in each step take few programs."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from against_cpu import value_and_gradients
from compile_counts import compiles
from tpu_core import modes


@pytest.fixture(autouse=True)
def fused():
    with modes.using("fused"):
        yield


def test_packed_sequences() -> None:
    """Batches of one size."""

    def step(seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 15, (6,), generator=g)
        x = torch.randn(6, int(lengths.max()), 3, generator=g).to("tpu").requires_grad_()
        packed = pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        pad_packed_sequence(packed, True)[0].square().sum().backward()
        x.grad.cpu()

    assert compiles(step, range(40)) <= 12
    assert compiles(step, range(40, 60)) <= 1


def test_connectionist_temporal_classification() -> None:
    """Batches of one size, of other steps, lengths and labels."""

    def result(device: str, seed: int, steps: int) -> list[torch.Tensor]:
        g, draw = torch.Generator().manual_seed(seed), random.Random(seed)
        inputs = torch.tensor([draw.randint(5, steps) for _ in range(3)])
        targets = torch.tensor([draw.randint(0, 5) for _ in range(3)])
        x = torch.randn(steps, 3, 6, generator=g).to(device).requires_grad_()
        labels = torch.randint(1, 5, (3, int(targets.max())), generator=g).to(device)
        if seed % 5 == 4:
            inputs, targets = inputs.to(device), targets.to(device)
        loss = F.ctc_loss(x.log_softmax(2), labels, inputs, targets)
        loss.backward()
        return [loss.detach().cpu(), x.grad.cpu()]

    def step(seed: int) -> None:
        want, have = (result(device, 6 * seed, 8 + seed % 9) for device in ("cpu", "tpu"))
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5, equal_nan=True)

    assert compiles(step, range(24)) <= 16
    assert compiles(step, range(24, 34)) <= 1


FULL = 40
PADDED_TO_A_SIZE = {
    "behind": lambda x: F.pad(x, (0, 0, 0, FULL - x.shape[1])) * 2,
    "in front": lambda x: F.pad(x, (0, 0, FULL - x.shape[1], 0), value=3.0).exp(),
    "the logarithms": lambda x: F.pad(
        x.log_softmax(1), (0, 0, 0, FULL - x.shape[1]), value=float("-inf")
    ).logsumexp(1),
    "a slice": lambda x: F.pad(x[:, 1:], (0, 0, 0, FULL + 1 - x.shape[1])).cumsum(1),
    "in front and behind": lambda x: F.pad(x, (0, 0, 2, FULL - 2 - x.shape[1])).flip(1),
    "zeros behind": lambda x: torch.cat([x, x.new_zeros(len(x), FULL - x.shape[1], 3)], 1).cos(),
    "spectra": lambda x: torch.fft.rfft(x.transpose(1, 2), n=FULL).abs(),
    "by more and by less": lambda x: F.pad(x, (0, 0, 0, 12 - x.shape[1])).sin(),
}


@pytest.mark.parametrize("name", PADDED_TO_A_SIZE)
def test_padding_to_one_size(name: str) -> None:
    function, draw = PADDED_TO_A_SIZE[name], random.Random(7)

    def step(_: int) -> None:
        x = torch.randn(draw.randint(2, 6), draw.randint(3, 33), 3)
        here, there = (value_and_gradients(function, [x], d) for d in ("cpu", "tpu"))
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)

    assert compiles(step, range(14)) <= 8
    assert compiles(step, range(10)) <= 2
