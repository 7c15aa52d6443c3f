"""Compiles of a step that runs with several sizes or places."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tpu_core.metrics import METRICS


def compiles(step: Callable[[int], None], steps: Iterable[int]) -> int:
    """Compiles while ``step`` runs with each of ``steps``."""
    before = METRICS.snapshot()
    for i in steps:
        step(i)
    return int(METRICS.delta(before)["compiles"])
