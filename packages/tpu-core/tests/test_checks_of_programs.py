"""Random programs with and without a mistake: each is caught, and none falsely."""

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


@pytest.mark.parametrize("mode", ["strict", "segments"])
@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int, mode: str):
    with torch.tpu.set_eager_mode(mode):
        checked_programs.check(seed)
