"""A program serves a segment of the same ops that has fewer live results, or more free inputs."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

SMALL, LARGE = 7, 40_000
# Each test has a rank of its own: programs of one rank may serve each other's sizes.
(ALL, MISSING, ALIVE, FREED, COSTLY, ODD) = range(3, 9)


@pytest.fixture(autouse=True)
def fused() -> object:
    with torch.tpu.set_eager_mode("fused"):
        yield


def counted() -> tuple[float, float]:
    count = torch.tpu.metrics()
    return count["compiles"] + count["cache_hits_disk"], count["substitutions"]


def since(before: tuple[float, float]) -> tuple[float, float]:
    now = counted()
    return now[0] - before[0], now[1] - before[1]


def chain(x: torch.Tensor) -> list[torch.Tensor]:
    values = [x]
    for f in (torch.sin, torch.cos, torch.tanh, torch.neg):
        values.append(f(values[-1]))
    return values[1:]


def start(rank: int, size: int = SMALL) -> torch.Tensor:
    x = torch.full((size, *(1,) * (rank - 1)), 0.3, device="tpu")
    torch.tpu.synchronize()
    return x


def kept(x: torch.Tensor, which: tuple[int, ...]) -> None:
    """Run the chain with only some of its results alive, and check these."""
    values = chain(x)
    for i in sorted(set(range(4)) - set(which), reverse=True):
        del values[i]
    torch.tpu.synchronize()
    expected = chain(x.cpu())
    for value, i in zip(values, which, strict=True):
        torch.testing.assert_close(value.cpu(), expected[i])


def test_results_that_nothing_reads_are_dropped() -> None:
    x = start(ALL)
    kept(x, (0, 1, 2, 3))
    memory = torch.tpu.memory_allocated()
    for i, which in enumerate([(3,), (0, 2), (1,), (3,), (3,), (3,), (3,)]):
        before = counted()
        kept(x, which)
        assert since(before) == (0, 1), (i, which)
    assert torch.tpu.memory_allocated() == memory


def test_a_result_that_the_program_lacks_is_compiled() -> None:
    x = start(MISSING)
    kept(x, (3,))
    before = counted()
    kept(x, (1, 3))
    assert since(before) == (1, 0)


def step(weight: torch.Tensor) -> torch.Tensor:
    return weight * 0.5 + 1


def test_an_input_that_is_alive_is_never_donated() -> None:
    before = counted()
    step_of_free = step(start(ALIVE))
    torch.tpu.synchronize()
    assert since(before)[0] == 2  # `start`, and the step, which takes its input's memory
    before, weight = counted(), start(ALIVE)
    result = step(weight)
    torch.tpu.synchronize()
    assert since(before) == (1, 0)
    assert weight.flatten().tolist() == pytest.approx([0.3] * SMALL)
    assert result.tolist() == step_of_free.tolist()
    assert result.flatten().tolist() == pytest.approx([1.15] * SMALL)


def test_an_input_that_could_be_donated_is_freed() -> None:
    weight = start(FREED)
    step(weight).cpu()
    memory = torch.tpu.memory_allocated()
    before = counted()
    weight = step(weight)
    torch.tpu.synchronize()
    assert since(before) == (0, 1)
    assert weight.flatten().tolist() == pytest.approx([1.15] * SMALL)
    assert torch.tpu.memory_allocated() == memory


def test_what_costs_memory_again_and_again_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    x = start(COSTLY, LARGE)
    kept(x, (0, 1, 2, 3))
    made = []
    with caplog.at_level(logging.INFO, "tpu_core"):
        for _ in range(6):
            before = counted()
            kept(x, (3,))
            made.append(since(before))
    assert made == [(0, 1)] * 3 + [(1, 0)] + [(0, 0)] * 2
    assert caplog.text.count("compiled 4 ops") == 1


def test_values_freed_at_odd_times_make_few_programs() -> None:
    x = start(ODD)
    before = counted()
    for count in range(1, 5):
        for which in itertools.combinations(range(4), count):
            kept(x, which)
    assert since(before)[0] <= 4
