"""``F.ctc_loss``: as on the CPU, and other lengths are no other programs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from compile_counts import compiles


def result(device: str, seed: int, batch: int, steps: int, **options: Any) -> list[torch.Tensor]:
    g, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    # Empty targets, inputs of no steps, and targets that no path of the input spells.
    inputs = [draw.randint(0 if seed % 3 else 5, steps) for _ in range(batch)]
    targets = [draw.randint(0, 5) for _ in range(batch)]
    x = torch.randn(steps, batch, 6, generator=g).to(device).requires_grad_()
    labels = torch.randint(1, 5, (batch, max(targets) + seed % 2), generator=g)
    if seed % 4 == 3:  # one after the other
        labels = torch.cat([row[:n] for row, n in zip(labels, targets)])
    lengths = torch.tensor(inputs), torch.tensor(targets)
    if seed % 5 == 4:
        lengths = tuple(t.to(device) for t in lengths)
    loss = F.ctc_loss(x.log_softmax(2), labels.to(device), *lengths, **options)
    loss.sum().backward()
    return [loss.detach().cpu(), x.grad.cpu()]


@pytest.mark.parametrize(
    "options",
    [{}, {"zero_infinity": True}, {"reduction": "none", "blank": 5}, {"reduction": "sum"}],
    ids=str,
)
def test_values_and_gradients(every_tier: None, options: dict[str, Any]) -> None:
    for seed in range(7):
        sizes = 2 + seed % 2, 7 + seed
        want = result("cpu", seed, *sizes, **options)
        have = result("tpu", seed, *sizes, **options)
        for a, b in zip(want, have, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_lengths_are_no_programs() -> None:
    """Batches of one size, of other lengths and labels."""

    def step(seed: int) -> None:
        want, have = (result(d, 6 * seed, 3, 8) for d in ("cpu", "tpu"))
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5, equal_nan=True)

    assert compiles(step, range(24)) <= 6
    assert compiles(step, range(24, 34)) == 0


def errors(device: str) -> list[str | None]:
    x = torch.zeros(6, 3, 5, device=device)
    labels = torch.ones(3, 4, dtype=torch.int64, device=device)
    calls: list[tuple[Any, ...]] = [
        (x, labels, [6, 5, 4], [4, 2, 1], 9),
        (x, labels, [6, 5], [4, 2, 1]),
        (x, labels, [6, 5, 4], [1, 1]),
        (x, labels, [7, 5, 4], [4, 2, 1]),
        (x, labels, [-1, 5, 4], [4, 2, 1]),
        (x, labels, [6, 5, 4], [5, 2, 1]),
        (x, labels, [6, 5, 4], [-1, 2, 1]),
        (x, labels.flatten()[:6], [6, 5, 4], [4, 2, 1]),
        (x, labels[:2], [6, 5, 4], [4, 2, 1]),
    ]
    return [_raised(call) for call in calls]


def _raised(call: tuple[Any, ...]) -> str | None:
    x, labels, inputs, targets, *blank = call
    try:
        F.ctc_loss(x, labels, torch.tensor(inputs), torch.tensor(targets), *blank)
    except RuntimeError as error:
        return str(error)
    return None


def test_errors_are_those_of_pytorch(every_tier: None) -> None:
    found = errors("tpu")
    assert found == errors("cpu")
    assert all(found)
