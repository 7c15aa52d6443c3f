"""Checks of values on padded arrays: each mistake is caught, and none falsely."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import checked_programs
from tpu_core.recorder import checked


@pytest.fixture(autouse=True)
def everything() -> Iterator[None]:
    """Each check on the list."""
    torch.zeros(1, device="tpu")
    checked.switch("all")
    yield
    checked.switch("default")


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_of_several_sizes(seed: int):
    with torch.tpu.set_eager_mode("fused"):
        checked_programs.check(seed)


def test_programs_of_many_sizes_run_on_padded_arrays():
    with torch.tpu.set_eager_mode("fused"):
        torch.tpu.reset_metrics()
        for n in range(9, 30, 2):
            for is_bad in (False, n % 4 == 1):
                found = checked_programs.run(3, is_bad, (n, 5), "tpu")
                assert isinstance(found, str) == is_bad
        assert torch.tpu.metrics()["padded_executions"] > 15
