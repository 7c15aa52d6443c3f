"""Programs for sizes that vary serve dims of size 1 too, and inputs that could be reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from tpu_core import modes
from tpu_core.metrics import METRICS


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    with modes.using("fused"):
        yield


def made(n: int, *rest: int) -> torch.Tensor:
    return torch.randn(n, *rest, generator=torch.Generator().manual_seed(n))


W1, W2, ROWS = made(64, 32), made(32, 64), made(20, 32)


def expert(device: str, n: int) -> torch.Tensor:
    """A part of the rows through a layer, as a mixture of experts sends its tokens."""
    rows, up, down = (t.to(device) for t in (ROWS, W1, W2))
    chosen = torch.arange(20).roll(n)[:n].to(device)
    y = F.linear(F.silu(F.linear(rows[chosen], up)), down) * rows[chosen, 0, None].sigmoid()
    return torch.zeros_like(rows).index_add_(0, chosen, y)


def boxes(device: str, n: int) -> torch.Tensor:
    """Overlaps of some boxes with others."""
    a, b = made(n, 4).to(device), made(3, 4).to(device)
    low, high = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    return (shared / (a[:, 2:].prod(1)[:, None] + 10)).max(1).values


def gradients(device: str, n: int) -> torch.Tensor:
    x, w = (t.clone().to(device).requires_grad_() for t in (made(n, 32), W1))
    F.cross_entropy(F.linear(x, w), torch.arange(n, device=device) % 64).backward()
    assert x.grad is not None and w.grad is not None
    return torch.cat([x.grad.sum(0), w.grad.sum(0)])


def compiles(work: Callable[[str, int], torch.Tensor], sizes: list[int]) -> int:
    """Programs that were compiled or loaded for some sizes; the values are the CPU's."""
    before = METRICS.snapshot()
    for n in sizes:
        assert_close(
            work("tpu", n).detach().cpu(),
            work("cpu", n).detach(),
            rtol=1e-4,
            atol=1e-5,
            equal_nan=True,
        )
    delta = METRICS.delta(before)
    return int(delta["compiles"] + delta["cache_hits_disk"])


@pytest.mark.parametrize("work", [expert, boxes, gradients])
def test_one_row(work: Callable[[str, int], torch.Tensor]) -> None:
    compiles(work, [6, 9, 13])
    assert compiles(work, [1, 5, 1, 7]) == 0


def test_both_of_two_sizes() -> None:
    def work(device: str, n: int) -> torch.Tensor:
        x, y = made(n, 8).to(device), made(1 + n % 4, 8).to(device)
        return torch.softmax(x @ y.T, 1).sum(0)

    compiles(work, [7, 9, 14, 18, 6])
    assert compiles(work, [1, 4, 8, 1]) == 0


# What a lowering does at one element is not what it does at several.
OTHERWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linspace": lambda x: x * torch.linspace(2, 5, len(x), device=x.device)[:, None],
    "logspace": lambda x: x * torch.logspace(0, 1, len(x), device=x.device)[:, None],
    "std": lambda x: x - x.std(0),
    "cov": lambda x: torch.cov(x.T),
    "quantile": lambda x: x.quantile(0.3, 0),
    "median": lambda x: x.median(0).values,
    "interpolate": lambda x: F.interpolate(x.T[None], 7, mode="linear", align_corners=True),
    "broadcast": lambda x: (x[:, None] * x[None]).sum(-1),
    "linspace of the rest": lambda x: (
        x[1:] * torch.linspace(2, 5, len(x) - 1, device=x.device)[:, None]
    ),
    "squeeze": lambda x: x.squeeze(0) * 2,
    "expand": lambda x: x.mean(0).expand(len(x), 4) * x,
    "stack": lambda x: torch.stack([x, x * 2]).permute(2, 0, 1).reshape(4, -1).cumsum(1),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_values_at_size_one(name: str) -> None:
    def work(device: str, n: int) -> torch.Tensor:
        return OTHERWISE[name](made(n, 4).to(device))

    compiles(work, [6, 9, 13, 2, 1, 2, 1, 5])


def reused(device: str, n: int, width: int, held: list[torch.Tensor] | None) -> torch.Tensor:
    x = made(n, width).to(device)
    if held is not None:
        held.append(x)
    return (x * 3).relu() + 1  # may take the memory of `x` where nothing else holds it


def test_inputs_that_could_be_reused() -> None:
    held: list[torch.Tensor] = []
    compiles(lambda device, n: reused(device, n, 7, held), [6, 9, 13])
    assert compiles(lambda device, n: reused(device, n, 7, None), [8, 5, 11]) == 0
    assert_close(held[0].cpu(), made(6, 7))


def test_large_inputs_are_reused() -> None:
    """Their memory is worth a program of its own."""
    held: list[torch.Tensor] = []
    compiles(lambda device, n: reused(device, n, 1 << 18, held), [6, 9, 13])
    assert compiles(lambda device, n: reused(device, n, 1 << 18, None), [8, 5, 11]) > 0


def test_inputs_that_are_held_are_not_reused() -> None:
    held: list[torch.Tensor] = []
    compiles(lambda device, n: reused(device, n, 5, None), [6, 9, 13])
    compiles(lambda device, n: reused(device, n, 5, held), [8, 5, 11])
    for n, x in zip((8, 5, 11), held[::2]):
        assert_close(x.cpu(), made(n, 5))
