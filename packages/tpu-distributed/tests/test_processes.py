"""What several processes do, each spawn a test: starting processes costs more than most cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import spawn


def show(failures: dict[str, str]) -> str:
    return "\n\n".join(f"{name}\n{problem}" for name, problem in failures.items())


def test_collectives_of_two() -> None:
    failures = spawn.run("cases_collectives", 2, timeout=150)
    assert not failures, show(failures)


def test_regions_where_ranks_run_the_same_program(tmp_path: Path) -> None:
    failures = spawn.run("cases_spmd", 2, timeout=100, TPU_FLIGHT_DIR=str(tmp_path))
    assert not failures, show(failures)


def test_groups_made_anew_and_split() -> None:
    failures = spawn.run("cases_groups", 2, timeout=100)
    assert not failures, show(failures)


def test_programs_that_span_all_devices() -> None:
    failures = spawn.run("cases_slices", 4, timeout=150, TPU_COLLECTIVES_SPAN="slice")
    assert not failures, show(failures)


def test_parallel_training_equals_one_process(tmp_path: Path) -> None:
    failures = spawn.run("cases_training", 2, timeout=250, CHECKPOINTS=str(tmp_path))
    assert not failures, show(failures)
    # What two ranks saved, in this one process: plain PyTorch on the CPU, then the device.
    expected = torch.load(tmp_path / "full.pt")
    for device in ("cpu", "tpu"):
        state = {"net": {name: torch.zeros_like(p).to(device) for name, p in expected.items()}}
        dcp.load(state, checkpoint_id=tmp_path / "of-two", no_dist=True)
        for name, p in state["net"].items():
            assert p.device.type == device
            assert torch.equal(p.cpu(), expected[name]), name


def test_what_pytorch_asks_of_a_device_in_a_group(tmp_path: Path) -> None:
    failures = spawn.run("cases_contract", 2, timeout=150, CHECKPOINTS=str(tmp_path))
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
def test_a_rank_that_is_stopped_for_a_while(tmp_path: Path) -> None:
    more = {"STOPPED_SECONDS": "30", "TPU_FLIGHT_DIR": str(tmp_path)}
    failures = spawn.run("cases_stopped", 2, timeout=150, **more)
    assert not failures, show(failures)


@pytest.mark.slow
def test_collectives_of_four() -> None:
    failures = spawn.run("cases_collectives", 4, timeout=250)
    assert not failures, show(failures)


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "size"), [("cases_spmd", 4), ("cases_spmd_parallel", 2)])
def test_regions(cases: str, size: int, tmp_path: Path) -> None:
    failures = spawn.run(cases, size, timeout=250, TPU_FLIGHT_DIR=str(tmp_path))
    assert not failures, show(failures)


@pytest.mark.slow
def test_checkpoints_of_four_for_two_and_one(tmp_path: Path) -> None:
    for size in (4, 2):  # the two load what the four have written
        failures = spawn.run("cases_checkpoints", size, timeout=200, CHECKPOINTS=str(tmp_path))
        assert not failures, show(failures)
    expected = torch.load(tmp_path / "full.pt")
    for folder in ("of-4", "of-4-later", "of-2", "of-2-later"):
        model = {name: torch.zeros_like(p) for name, p in expected.items()}
        dcp.load({"model": model}, checkpoint_id=tmp_path / folder, no_dist=True)
        for name, p in model.items():
            torch.testing.assert_close(p, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_over_a_divided_sequence(size: int) -> None:
    failures = spawn.run("cases_context_parallel", size, timeout=250)
    assert not failures, show(failures)


@pytest.mark.slow
def test_dropout_over_a_divided_sequence() -> None:
    failures = spawn.run("cases_ring_dropout", 2, timeout=250)
    assert not failures, show(failures)


@pytest.mark.slow
def test_what_stands_on_collectives() -> None:
    failures = spawn.run("cases_ecosystem", 2, timeout=250)
    assert not failures, show(failures)
