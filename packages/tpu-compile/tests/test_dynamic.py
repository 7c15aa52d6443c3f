"""Graphs with sizes that vary: few programs, results and gradients of the CPU, no matter what
stands in the padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn

from tpu_core import config
from tpu_core.metrics import METRICS
from tpu_core.padding import arrays


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the padding of inputs with what must not be seen."""

    def blank(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        return np.full(shape, np.nan if dtype.kind == "f" else 97).astype(dtype)

    monkeypatch.setattr(arrays, "blank", blank)


class Counted:
    """What was compiled and run since."""

    def __init__(self) -> None:
        self._before = METRICS.snapshot()
        self._events = len(METRICS.compile_events())

    def __getitem__(self, name: str) -> int:
        return int(METRICS.delta(self._before)[name])

    @property
    def reasons(self) -> list[str]:
        return [e.reason for e in METRICS.compile_events()[self._events :]]


Inputs = list[torch.Tensor]


def weighted(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a loss that gives each element of its result a gradient of its own."""

    def run(*xs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = f(*xs)
        weights = torch.arange(out.numel(), device=out.device).view(out.shape) % 5 + 1.0
        return out.detach(), (out.float() * weights).sum()

    return run


def compare(
    f: Callable[..., Any],
    inputs: Sequence[Inputs],
    marked: dict[int, dict[str, int]] | None = None,
    **options: Any,
) -> Counted:
    """Run a compiled function on each of the inputs; results and gradients are those of the CPU.

    Args:
        f: A function or module.
        inputs: Arguments of each call.
        marked: Dims of the arguments to mark as dynamic, with what `mark_dynamic` takes.
        options: Of `torch.compile`.
    """
    own = copy.deepcopy(f).to("tpu") if isinstance(f, nn.Module) else f
    compiled = torch.compile(weighted(own), fullgraph=True, **options)
    counted = Counted()
    for xs in inputs:
        here = [x.clone().requires_grad_(x.is_floating_point()) for x in xs]
        there = [x.to("tpu").requires_grad_(x.is_floating_point()) for x in xs]
        for x in there:
            for dim, bounds in (marked or {}).items():
                torch._dynamo.mark_dynamic(x, dim, **bounds)
        found = []
        for run, given in ((weighted(f), here), (compiled, there)):
            out, loss = run(*given)
            loss.backward()
            found.append([out, *(x.grad for x in given if x.grad is not None)])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-4, atol=1e-4)
    return counted


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Sums, means and a softmax over the dim that varies, and its size as a number."""
    y = torch.softmax(x, 0) * x.shape[0] + x.mean(0) - x.std(0)
    return torch.cat([y, x[:1]]).cumsum(0)[1:]


def rows(*sizes: int) -> list[Inputs]:
    return [[torch.randn(n, 4)] for n in sizes]


def test_a_marked_dim_is_padded_from_the_first_call() -> None:
    counted = compare(mixed, rows(5, 7, 6, 8), marked={0: {"min": 2, "max": 64}})
    assert counted["compiles"] <= 2, counted.reasons
    assert counted["padded_executions"] >= 4


def test_the_largest_bucket_is_the_marked_maximum() -> None:
    counted = compare(mixed, rows(20, 33, 35, 40), marked={0: {"min": 2, "max": 40}})
    buckets = " ".join(counted.reasons)
    assert "20 in 32" in buckets
    assert "33 in 40" in buckets
    assert "64" not in buckets


def test_buckets_are_configured() -> None:
    with config.override(buckets=(10, 50)):
        counted = compare(mixed, rows(7, 9, 11, 48, 51), marked={0: {}})
    buckets = " ".join(counted.reasons)
    assert "7 in 10" in buckets
    assert "11 in 50" in buckets
    assert "51 in 64" in buckets  # past the last, they grow by themselves


def test_the_second_size_makes_a_dim_dynamic() -> None:
    counted = compare(mixed, rows(5, 7, 6, 8, 5, 7))
    assert counted["padded_executions"] >= 4
    assert compare(mixed, rows(5, 7, 6, 8))["compiles"] == 0
