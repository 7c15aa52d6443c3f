"""Tensors and counters for the tests of storages."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tpu_core import modes
from tpu_core.metrics import METRICS

WHOLE = modes.Mode("whole", max_ops=0)
EVERY_MODE = pytest.mark.parametrize("mode", [modes.STRICT, WHOLE], ids=lambda m: m.name)

# Not all of these pass yet (foreach over the parts of one buffer): run by `nox -s slow`.
pytestmark = pytest.mark.slow


def arange(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """On the device; counted on the CPU, so that no program is needed."""
    return torch.arange(torch.Size(sizes).numel(), dtype=dtype).reshape(sizes).to("tpu")


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@contextmanager
def programs() -> Iterator[Callable[[], int]]:
    """Counts the programs that are compiled, or loaded from disk, from here on."""

    def count() -> int:
        made = METRICS.snapshot()
        return int(made["compiles"] + made["cache_hits_disk"])

    torch.tpu.synchronize()
    before = count()
    yield lambda: count() - before


def nothing_new(work: Callable[[], Any]) -> None:
    """Run ``work``, which must find every program that it needs."""
    with programs() as made:
        work()
        torch.tpu.synchronize()
        assert made() == 0
