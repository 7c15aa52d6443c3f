"""A size that recurs gets a program of its own, and only where that pays."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable

import pytest
import torch

from tpu_core import _C, modes
from tpu_core.metrics import METRICS
from tpu_core.padding import programs as padded
from tpu_core.runtime import runtime
from tpu_eager.bucketing import families, promotion
from tpu_eager.fused import bucketed

# Wasted runs that take as long as a compile in these tests.
WASTED_RUNS = 8
# As many sizes of the bucket 96 as run in one of 256: each wastes 1 - 96 / 256 of a run.
SERVED = range(66, 66 + int(WASTED_RUNS / (1 - 96 / 256)))
# Each test has a program of its own: what is known of one lasts as long as the process, and what is
# compiled as long as the folder that pytest's processes share.
_lengths = itertools.count(
    1 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]),
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
)


@pytest.fixture(autouse=True)
def fused():
    with modes.using("fused"):
        yield


@pytest.fixture(autouse=True)
def slow_runs(monkeypatch):
    """Runs that take long beside a compile, so that buckets have no room and waste counts."""

    def waste(_: object, wanted: tuple[int, ...], used: tuple[int, ...], is_cpu: bool) -> float:
        return (1 - math.prod(wanted) / math.prod(used)) / WASTED_RUNS

    monkeypatch.setattr(families.Family, "waste", waste)


def chain(x: torch.Tensor, length: int) -> torch.Tensor:
    for _ in range(length):
        x = (x * 2).softmax(0)
    return x


def program() -> Callable[[int], None]:
    """A function that runs a program on a size and compares with the CPU."""
    length = next(_lengths)

    def run(n: int) -> None:
        x = torch.randn(n, 5)
        torch.testing.assert_close(chain(x.to("tpu"), length).cpu(), chain(x, length))

    return run


@pytest.fixture
def run() -> Callable[[int], None]:
    """A program that padded arrays serve: two sizes have run as they are."""
    run = program()
    for n in (65, 67):
        run(n)
    return run


class Delta:
    """What was compiled and run since."""

    def __init__(self) -> None:
        self._before = METRICS.snapshot()
        self._events = len(METRICS.compile_events())

    def __getitem__(self, name: str) -> int:
        return int(METRICS.delta(self._before)[name])

    @property
    def promotions(self) -> list[str]:
        reasons = [e.reason for e in METRICS.compile_events()[self._events :]]
        return [r for r in reasons if "recur" in r]


def repeat(run: Callable[[int], None], sizes: Iterable[int], times: int) -> Delta:
    delta = Delta()
    for _ in range(times):
        for n in sizes:
            run(n)
    return delta


def test_a_size_that_recurs_has_its_own_program(run):
    delta = repeat(run, [70], promotion.RUNS)
    assert delta.promotions == []
    assert delta["padded_executions"] == promotion.RUNS
    delta = repeat(run, [70], 5)
    assert delta.promotions == ["size 70 recurs: its own program instead of one padded to 96"]
    assert delta["padded_executions"] == 0
    assert delta["executions"] == 5
    # Others go on as before.
    delta = repeat(run, [71, 72], 2)
    assert delta["padded_executions"] == 4
    assert delta["compiles"] == 0


def test_few_sizes_of_a_program_have_one(run):
    delta = repeat(run, range(70, 76), promotion.RUNS + 5)
    assert len(delta.promotions) == 4


def test_one_size_of_many_has_none(run):
    delta = repeat(run, range(68, 80), promotion.RUNS + 5)
    assert delta.promotions == []


def test_a_size_whose_padding_costs_little_has_none(run, monkeypatch):
    monkeypatch.setattr(families.Family, "waste", lambda *_: 0.02)
    assert repeat(run, [70], promotion.RUNS + 5).promotions == []
    assert len(repeat(run, [70], 50 - promotion.RUNS).promotions) == 1


@pytest.mark.parametrize("size", [90, 96])
def test_a_size_that_fills_its_bucket_has_none(run, size):
    delta = repeat(run, [size], promotion.RUNS + 5)
    assert delta.promotions == []
    assert delta["padded_executions"] == promotion.RUNS + 5


def test_no_recompile_puts_it_off(run):
    repeat(run, [70], 2)
    with torch.tpu.no_recompile():
        delta = repeat(run, [70], promotion.RUNS + 5)
    assert delta.promotions == []
    assert len(repeat(run, [70], 1).promotions) == 1


@pytest.fixture
def large() -> Callable[[int], None]:
    """A program with a padded program for up to 256, of which what fits 96 takes three eighths."""
    run = program()
    for n in (65, 200):
        run(n)
    return run


def test_a_larger_program_serves_until_it_has_cost_many_runs(large):
    delta = repeat(large, SERVED, 1)
    assert delta["compiles"] == 0
    assert delta["padded_executions"] == len(SERVED)
    # Sizes known before and new ones alike have the better program from now on.
    delta = repeat(large, [66, 94, 67], 1)
    assert delta["compiles"] == 1
    assert delta["padded_executions"] == 3
    assert repeat(large, SERVED, 1)["compiles"] == 0


def test_no_recompile_leaves_the_larger_program(large):
    repeat(large, SERVED, 1)
    with torch.tpu.no_recompile():
        assert repeat(large, [66, 94], 1)["padded_executions"] == 2
    assert repeat(large, [66], 1)["compiles"] == 1


def test_arrays_that_are_padded_stay_so():
    length = next(_lengths)

    def generate() -> None:
        cache = torch.randn(65, 5)
        held = cache.to("tpu")
        for _ in range(12):
            token = torch.randn(1, 5)
            cache, held = torch.cat([cache, token]), torch.cat([held, token.to("tpu")])
            torch.testing.assert_close(chain(held, length).cpu(), chain(cache, length))

    repeat(lambda _: generate(), [0], 3)
    delta = repeat(lambda _: generate(), [0], promotion.RUNS + 5)
    assert delta.promotions == []
    assert delta["compiles"] == 0


def test_a_program_that_fails_its_check_never_runs(monkeypatch):
    monkeypatch.setattr(padded, "differences", lambda *_: "it came out otherwise")
    delta = repeat(program(), [65, 67, 69, 70, 71], 1)
    assert delta["padded_executions"] == 0


def test_the_key_of_a_padded_program_follows_the_sources_of_the_policy(monkeypatch):
    run, provider = program(), runtime().builder.provider(bucketed)

    def compiled() -> tuple[int, int]:
        """Programs compiled and loaded for three sizes, with nothing known of them."""
        monkeypatch.setattr(
            provider, "_families", families.Families(provider._context, lambda s, op: None)
        )
        torch.tpu.synchronize()
        _C.clear_programs()
        before = METRICS.snapshot()
        for n in (65, 67, 70):
            run(n)
        found = METRICS.delta(before)
        assert found["padded_executions"] == 2
        return int(found["compiles"]), int(found["cache_hits_disk"])

    assert compiled() == (2, 0)
    assert compiled() == (0, 2)
    monkeypatch.setattr(families, "package_digest", lambda name: f"another {name}")
    assert compiled() == (1, 1)
