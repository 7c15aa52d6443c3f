"""Collectives on random shapes, dtypes, layouts and groups against plain PyTorch.

A case that failed runs alone by ``python test_random_collectives.py <processes> "<case>"``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import spawn


def run(size: int, timeout: float, **more: str) -> None:
    failures = spawn.run("cases_random", size, timeout, **more)
    assert not failures, "\n".join(failures.values())


def test_random_collectives_of_two(tmp_path: Path) -> None:
    run(2, 100, SEED="1", COUNT="200", VARIANTS="30", TPU_FLIGHT_DIR=str(tmp_path))


@pytest.mark.parametrize("regions", ["alike", "apart"])
def test_in_and_out_of_regions(regions: str, tmp_path: Path) -> None:
    numbers = {"SEED": "1", "COUNT": "100", "VARIANTS": "26", "REGIONS": regions}
    run(2, 100, **numbers, TPU_FLIGHT_DIR=str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
@pytest.mark.parametrize("size", [2, 4])
def test_thousands_by_ranks_that_differ(size: int, seed: int, tmp_path: Path) -> None:
    numbers = {"SEED": str(seed), "COUNT": "1500", "VARIANTS": "400"}
    run(size, 550, **numbers, DIVERGES="1", TPU_FLIGHT_DIR=str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fused", "strict"])
@pytest.mark.parametrize("regions", ["alike", "apart"])
@pytest.mark.parametrize("size", [2, 4])
def test_hundreds_in_and_out_of_regions(size: int, regions: str, mode: str, tmp_path: Path) -> None:
    numbers = {"SEED": "5", "COUNT": "600", "VARIANTS": "100", "REGIONS": regions}
    diverges = "1" if regions == "apart" else "0"
    more = {"DIVERGES": diverges, "TPU_EAGER_MODE": mode, "TPU_FLIGHT_DIR": str(tmp_path)}
    run(size, 550, **numbers, **more)


if __name__ == "__main__":
    run(int(sys.argv[1]), 100, CASE=sys.argv[2])
