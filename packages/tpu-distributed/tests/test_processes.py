"""What several processes do, each spawn a test: starting processes costs more than most cases."""

from __future__ import annotations

from pathlib import Path

import pytest

import spawn


def show(failures: dict[str, str]) -> str:
    return "\n\n".join(f"{name}\n{problem}" for name, problem in failures.items())


def test_collectives_of_two() -> None:
    failures = spawn.run("cases_collectives", 2, timeout=150)
    assert not failures, show(failures)


def test_parallel_training_equals_one_process() -> None:
    failures = spawn.run("cases_training", 2, timeout=250)
    assert not failures, show(failures)


def test_ranks_that_disagree_or_are_late(tmp_path: Path) -> None:
    failures = spawn.run("cases_faults", 2, timeout=100, TPU_FLIGHT_DIR=str(tmp_path))
    assert not failures, show(failures)


@pytest.mark.parametrize("lost", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_survivors_go_on(lost: int, tmp_path: Path) -> None:
    more = {"LOST": str(lost), "TPU_FLIGHT_DIR": str(tmp_path)}
    failures = spawn.run("cases_lost_peer", 3, timeout=100, **more)
    assert not failures, show(failures)


@pytest.mark.slow
def test_collectives_of_four() -> None:
    failures = spawn.run("cases_collectives", 4, timeout=250)
    assert not failures, show(failures)


@pytest.mark.slow
def test_what_stands_on_collectives() -> None:
    failures = spawn.run("cases_ecosystem", 2, timeout=250)
    assert not failures, show(failures)
