"""Compiles of a step that runs with several sizes or places."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tpu_core.metrics import METRICS


def compiles(step: Callable[[int], None], steps: Iterable[int]) -> int:
    """Compiles while ``step`` runs with each of ``steps``; printed, for a test that fails."""
    torch.tpu.synchronize()  # ops that another test left recorded belong to no step
    before = torch.tpu.metrics()["compiles"]
    for i in steps:
        step(i)
    count = int(torch.tpu.metrics()["compiles"] - before)
    compiled = [event for event in METRICS.compile_events() if event.source != "disk"]
    for event in compiled[len(compiled) - count :]:
        print(event)
    return count
