"""Compiles of a step that runs with several sizes or places."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def compiles(step: Callable[[int], None], steps: Iterable[int]) -> int:
    """Compiles while ``step`` runs with each of ``steps``; a report is printed if there are any."""
    torch.tpu.synchronize()  # ops that another test left recorded belong to no step
    before = torch.tpu.metrics()["compiles"]
    for i in steps:
        step(i)
    count = int(torch.tpu.metrics()["compiles"] - before)
    if count:
        print(torch.tpu.compile_report())
    return count
