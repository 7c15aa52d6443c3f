"""After a few steps a training loop neither compiles nor waits for the device."""

from __future__ import annotations

import pytest
from training import FLOAT32_JOBS, STEPS, every_mode, train

# Its trainings take longest, and `test_models.py` compares them with the CPU.
SLOW = {"resnet18": pytest.mark.slow}
NAMES = [pytest.param(n, marks=SLOW[n]) if n in SLOW else n for n in FLOAT32_JOBS]


@every_mode
@pytest.mark.parametrize("name", NAMES)
def test_no_compile_after_the_third_step(name: str, mode: str) -> None:
    programs = [step["compiles"] + step["cache_hits_disk"] for step in train(name, mode).counted]
    assert programs[3:] == [0] * (STEPS[mode] - 3)


@every_mode
@pytest.mark.parametrize("name", NAMES)
def test_no_wait_and_no_fallback_in_a_step(name: str, mode: str) -> None:
    counted = train(name, mode).counted
    assert [(s["host_syncs"], s["fallbacks"]) for s in counted] == [(0, 0)] * STEPS[mode]


@pytest.mark.parametrize("name", NAMES)
def test_fused_runs_a_step_as_one_program(name: str) -> None:
    counted = train(name, "fused").counted
    assert [step["executions"] for step in counted[3:]] == [1] * (STEPS["fused"] - 3)
