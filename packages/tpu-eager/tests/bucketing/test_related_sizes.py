"""Programs whose sizes are many, or follow from one another: few are compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from tpu_core import modes
from tpu_core.metrics import METRICS
from tpu_core.padding import shapes


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    with modes.using("fused"):
        yield


def generator(n: int) -> torch.Generator:
    return torch.Generator().manual_seed(n)


# Batch and length of each step.
SIZES = ((2, 24), (8, 40), (7, 22), (6, 47), (3, 26), (4, 20), (5, 13))
TABLE = torch.randn(64, 16, generator=generator(0))
EXPERTS = torch.randn(8, 16, 16, generator=generator(1))


def next_tokens(device: str, step: int) -> list[torch.Tensor]:
    """Loss and gradient of a language model over sequences without their last tokens."""
    ids = torch.randint(64, SIZES[step], generator=generator(step)).to(device)
    table = TABLE.clone().to(device).requires_grad_()
    hidden = torch.tanh(F.embedding(ids[:, :-1], table))
    logits = hidden @ table.T
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    assert table.grad is not None
    return [loss.detach(), table.grad]


def mixture(device: str, step: int) -> list[torch.Tensor]:
    """Each row through the experts that routers chose, with as many sizes as experts."""
    g = generator(step)
    x = torch.randn(math.prod(SIZES[step]), 16, generator=g)
    chosen = torch.randint(8, (2, len(x)), generator=g)
    parts = [[(c == e).nonzero()[:, 0].to(device) for e in range(8)] for c in chosen]
    x, experts = x.to(device), EXPERTS.clone().to(device).requires_grad_()
    for layer in parts:
        out = torch.zeros_like(x)
        for part, expert in zip(layer, experts):
            out = out.index_add(0, part, torch.tanh(x[part] @ expert))
        x = x + out
    x.square().mean().backward()
    assert experts.grad is not None
    return [x.detach(), experts.grad]


def ranked(device: str, step: int) -> list[torch.Tensor]:
    """The larger part of each row, whose bucket may be larger than that of the row."""
    n = (12, 16, 9, 15, 31, 11, 25)[step]
    x = torch.randn(3, n, generator=generator(step)).to(device)
    values, indices = x.topk(n - n // 8, 1)
    return [values.cumsum(1), x.gather(1, indices.sort(1).values).cumsum(1)]


def heads_of_rows(device: str, step: int) -> list[torch.Tensor]:
    """Rows, which come first, as a batch of sequences, and their columns as heads."""
    batch, length = SIZES[step]
    heads = (2, 7, 5, 3, 4, 6, 9)[step]
    x = torch.randn(batch * length, heads * 8, generator=generator(step)).to(device)
    x.requires_grad_()
    y = F.gelu(x.view(batch, length, -1)).cumsum(1)
    z = y.view(batch, length, heads, 8).transpose(1, 2).softmax(-2)
    z.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), z.detach(), x.grad]


IMAGES = ((4, 17, 27), (5, 25, 17), (3, 30, 26), (4, 21, 25), (5, 31, 22), (4, 32, 31), (6, 18, 20))
KERNEL = torch.randn(3, 3, 3, 3, generator=generator(2))


def halved(device: str, step: int) -> list[torch.Tensor]:
    """Images that are halved, doubled and brought back to their size, odd ones at first."""
    x = torch.randn(IMAGES[step][0], 3, *IMAGES[step][1:], generator=generator(step)).to(device)
    w = KERNEL.clone().to(device).requires_grad_()
    whole = F.conv2d(x, w, padding=1)
    half = F.max_pool2d(F.silu(whole), 2)
    double = F.conv_transpose2d(half, w[:, :, 1:, 1:], stride=2)
    y = F.interpolate(double, size=whole.shape[-2:], mode="bilinear") + whole
    y.sum().item()  # so that the backward is another program, with sizes of both as inputs
    y.square().mean().backward()
    assert w.grad is not None
    return [y.detach(), w.grad]


def test_rows_are_moved_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """libtpu takes minutes for a program that fetches each element by its index."""
    called: list[object] = []
    by_index = shapes._reshape_by_index
    monkeypatch.setattr(shapes, "_reshape_by_index", lambda *a: called.append(a) or by_index(*a))
    test_programs(heads_of_rows, 3)
    assert not called


@pytest.mark.parametrize("work, most", [(next_tokens, 3), (mixture, 3), (ranked, 3), (halved, 6)])
def test_programs(work: Callable[[str, int], list[torch.Tensor]], most: int) -> None:
    before = METRICS.snapshot()
    for step in range(len(SIZES)):
        for a, b in zip(work("tpu", step), work("cpu", step), strict=True):
            assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
    delta = METRICS.delta(before)
    assert delta["compiles"] + delta["cache_hits_disk"] <= most
