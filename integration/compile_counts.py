"""Compiles of a step that runs with several sizes or places."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def compiles(step: Callable[[int], None], steps: Iterable[int]) -> int:
    """Compiles while ``step`` runs with each of ``steps``."""
    before = torch.tpu.metrics()["compiles"]
    for i in steps:
        step(i)
    return int(torch.tpu.metrics()["compiles"] - before)
