"""Loops without a read and without an optimizer settle on a few programs, wherever they began."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from tpu_core import modes
from tpu_eager.fused import FUSED

# Fused with short segments: a loop is found after 40 ops and cut at 10 at the earliest.
SMALL = dataclasses.replace(FUSED, name="small", max_ops=80)
OPS = (torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.relu, torch.neg, torch.abs)
ROUNDS = 30  # a loop that comes in between each sixth round has settled by its fourth time

Round = Callable[[torch.Tensor, int], torch.Tensor]


def ops(x: torch.Tensor, count: int, start: int = 0) -> torch.Tensor:
    for k in range(start, start + count):
        x = OPS[(k * k + k // 7) % 7](x)
    return x


def layers(x: torch.Tensor, count: int) -> torch.Tensor:
    """Equal layers of 9 ops, then a head of 5."""
    for _ in range(count):
        x = ops(x, 9)
    return ops(x, 5, 50)


LOOPS: dict[str, Round] = {
    "shorter than a segment": lambda x, _: ops(ops(ops(ops(x, 3), 3), 3), 3),
    "one round a segment": lambda x, _: ops(x, 37),
    "with equal layers": lambda x, _: layers(x, 7),
    "longer than a segment": lambda x, _: ops(x, 131),
    "layers longer than a segment": lambda x, _: layers(x, 17),
    "lengths that vary": lambda x, i: layers(x, 1 + i * i * 5 % 7),
    "logging": lambda x, i: x + x.sum().item() * 0 if i % 7 == 6 else ops(x, 37),
    "another loop in between": lambda x, i: layers(x, 8) if i % 6 == 5 else ops(x, 37),
}


def prepared() -> float:
    count = torch.tpu.metrics()
    return count["compiles"] + count["cache_hits_disk"]


def repeated(body: Round, offset: int) -> tuple[torch.Tensor, list[float], float]:
    """Result, programs made in each round, and programs run."""
    x = torch.full((3,), 0.3, device="tpu")
    torch.tpu.synchronize()
    x = ops(x, offset, 20)
    made, run = [], torch.tpu.metrics()["executions"]
    for i in range(ROUNDS):
        before = prepared()
        x = body(x, i)
        made.append(prepared() - before)
    return x, made, torch.tpu.metrics()["executions"] - run


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_settles_wherever_it_began(name: str) -> None:
    with modes.using(SMALL):
        first, made, _ = repeated(LOOPS[name], 0)
        assert made[-6:] == [0] * 6, made
        for offset in (5, 17, 41):
            # The segment of the beginning is new, the ones of the loop are not.
            x, made, run = repeated(LOOPS[name], offset)
            assert sum(made) <= 3 and made[3:] == [0] * (ROUNDS - 3), made
            assert run > 1
            expected = ops(torch.full((3,), 0.3), offset, 20)
            for i in range(ROUNDS):
                expected = LOOPS[name](expected, i)
            torch.testing.assert_close(x.cpu(), expected)
    assert not torch.isnan(first).any()


def test_a_round_is_one_program() -> None:
    body = LOOPS["one round a segment"]
    with modes.using(SMALL):
        repeated(body, 0)
        _, _, run = repeated(body, 11)
    assert ROUNDS - 1 <= run <= ROUNDS + 1


def test_an_outer_loop_is_cut_rather_than_the_loop_in_it() -> None:
    def body(x: torch.Tensor, _: int) -> torch.Tensor:
        return layers(x, 5)

    with modes.using(SMALL):
        repeated(body, 0)
        _, _, run = repeated(body, 11)
    assert ROUNDS - 1 <= run <= ROUNDS + 1


def test_a_short_chain_is_not_cut() -> None:
    with modes.using(FUSED):
        for _ in range(3):
            x = torch.full((3,), 0.3, device="tpu")
            before = torch.tpu.metrics()["executions"]
            for _ in range(40):
                x = ops(x, 5)
            x.cpu()
            assert torch.tpu.metrics()["executions"] - before == 1


def test_what_never_repeats_is_bounded() -> None:
    with modes.using(SMALL):
        # Of a size that no loop above has: its ops are no cut points yet.
        x = torch.full((37,), 0.3, device="tpu")
        torch.tpu.synchronize()
        before = torch.tpu.metrics()["segments"]
        x = ops(x, 200)
        torch.tpu.synchronize()
        segments = torch.tpu.metrics()["segments"] - before
    assert 3 <= segments <= 6
    torch.testing.assert_close(x.cpu(), ops(torch.full((37,), 0.3), 200))
