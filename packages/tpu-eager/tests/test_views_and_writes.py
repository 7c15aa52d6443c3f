"""Random programs of views, writes and copies on padded arrays, and op by op in the background.

The modes of tpu-core are tested there by the same programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from aliasing.programs import Program, check
from tpu_core import _C, modes
from tpu_core.config import override
from tpu_core.metrics import METRICS
from tpu_eager.background import scheduler


@contextmanager
def in_background() -> Iterator[None]:
    with override(compile="background"), modes.using("fused"):
        yield


def test_dozens_of_programs() -> None:
    check(range(40), in_background)


def test_programs_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_SHARE", float("inf"))
    before = torch.tpu.metrics()["pieces"]
    check(range(500, 530), in_background)
    assert torch.tpu.metrics()["pieces"] > before + 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(10))
def test_thousands_of_programs(part: int) -> None:
    start = 1000 * (part + 1)
    check(range(start, start + 150), in_background)
    _C.clear_programs()


@pytest.mark.usefixtures("restless")
def test_programs_that_go_over_to_those_on_padded_arrays() -> None:
    before = METRICS.snapshot()
    with modes.using("fused"):
        for seed in range(40):
            for _ in range(4):
                Program.of_seed(seed).run()
    assert METRICS.delta(before)["promotions"] > 5
