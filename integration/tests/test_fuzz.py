"""A share of each fuzzer, their corpus, and the planted faults that each share must find.

A share has a number of cases and a time, whichever ends first: on a busy machine it is shorter,
never another. `nox -s fuzz` draws on with other seeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fuzz.cases import TIERS, Settings, tiers_of_case
from fuzz.frame import fuzzer
from fuzz.minimise import candidates
from fuzz.planted import PLANTED

INTEGRATION = Path(__file__).parents[1]
SECONDS = 75
FUZZERS = ("calls", "aliasing", "programs", "xla", "mistakes")
COUNTS = {"calls": 200, "aliasing": 150, "programs": 3, "xla": 230, "mistakes": 12}
SEEDS = {"calls": 1, "aliasing": 1, "programs": 1, "xla": 1, "mistakes": 1}
# The fuzzer whose share finds the fault; aliasing's rounds read what was given away.
FINDS = {"donation": "aliasing"}


def fuzz(
    tmp_path: Path, name: str, *options: str, timeout: float = 280
) -> tuple[dict[str, Any], str]:
    """The report of a run, as data and as text."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "fuzz", name, "--json", str(report), *options]
    # With the optimizations that users have; other tests go without.
    inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        command,
        env={**inherited, "PYTHONPATH": str(INTEGRATION), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]
    (data,) = json.loads(report.read_text())
    return data, done.stdout


@pytest.mark.parametrize("name", FUZZERS)
def test_nothing_is_found_in_a_share(name: str, tmp_path: Path) -> None:
    limits = ("--seconds", str(SECONDS), "--count", str(COUNTS[name]), "--minimise-seconds", "30")
    data, text = fuzz(tmp_path, name, "--seed", str(SEEDS[name]), *limits)
    assert data["cases"] > 0
    assert not data["findings"], text


@pytest.mark.parametrize("name", FUZZERS)
def test_what_was_found_is_right(name: str, tmp_path: Path) -> None:
    data, text = fuzz(tmp_path, name, "--replay")
    assert not data["findings"], text


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_in_a_share(fault: str, tmp_path: Path) -> None:
    name = FINDS.get(fault, "calls")
    kept = tmp_path / "corpus"
    # A busy machine may take longer for as many cases.
    limits = ("--seconds", "500", "--count", str(COUNTS[name]), "--minimise-seconds", "60")
    ends = ("--most-findings", "1", "--keep", "--corpus", str(kept))
    seed = str(SEEDS[name])
    planted = ("--plant", fault, "--tiers", "compiled")  # faults of programs
    data, text = fuzz(tmp_path, name, "--seed", seed, *planted, *limits, *ends, timeout=800)
    assert data["findings"], text
    assert data["findings"][0]["failure"]["kind"] != "exception", text
    assert "not minimised" not in data["findings"][0]["found"], text
    # It is the fault's: its cases fail with it, and with it alone.
    again, text = fuzz(tmp_path, name, "--replay", "--corpus", str(kept), *planted)
    assert again["findings"], text
    without, text = fuzz(tmp_path, name, "--replay", "--corpus", str(kept))
    assert not without["findings"], text


def test_settings_reach_the_process() -> None:
    environment = Settings("strict", "background", tiers="restless").environment()
    assert environment["TPU_EAGER_MODE"] == "strict"
    assert environment["TPU_COMPILE"] == "background"
    assert environment["TPU_TIERS"] == "auto"
    assert float(environment["TPU_TIER_PATIENCE"]) < 1


def test_all_tiers_are_drawn_and_cases_do_not_depend_on_them() -> None:
    assert {tiers_of_case(f"1/{i}") for i in range(50)} == set(TIERS)
    assert tiers_of_case("1/7") == tiers_of_case("1/7")
    f = fuzzer("aliasing")
    case = replace(f.draw(Random("1/7")), tiers="restless")
    smaller = list(candidates(f, case))
    assert [c.tiers for c in smaller[:3]] == ["compiled", "host", "auto"]
    assert {c.tiers for c in smaller[3:]} == {"restless"}
