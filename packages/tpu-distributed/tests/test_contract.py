"""The rows of the device contract that are this package's: each is shown by a test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import spawn
from tpu_core.conformance import Requirement, device_contract

ROWS = [r for r in device_contract().requirements if r.package == "tpu-distributed"]
FOLDER = Path(__file__).parent


def test_there_are_rows() -> None:
    assert {row.group for row in ROWS} == {"C", "F"}
    assert {row.status for row in ROWS} == {"yes"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row_is_shown_by_a_test(row: Requirement) -> None:
    assert row.check is not None
    module, _, case = row.check.partition(".")
    assert (FOLDER / f"{module}.py").exists()
    if module.startswith("cases_"):
        assert case in ("", *spawn.cases_of(module))
        assert f'"{module}"' in (FOLDER / "test_processes.py").read_text()


def test_torchrun_counts_devices() -> None:
    """``--nproc-per-node=auto`` and ``=tpu``."""
    code = "from torch.distributed.run import determine_local_world_size as count\n"
    code += "print(count('auto'), count('tpu'))"
    command, env = [sys.executable, "-c", code], spawn.environment(TPU_NUM_DEVICES="3")
    printed = subprocess.check_output(command, env=env, text=True, timeout=100)
    assert printed.split() == ["3", "3"]
