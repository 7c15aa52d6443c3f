"""Modes of another package: Fused without its policies, and Debug without its checks."""

from __future__ import annotations

from typing import Any

from tpu_core.extend import Mode


def inspect(segment: Any, inputs: list[Any], outputs: list[Any]) -> None:
    """Accept all results."""


SEGMENTS = Mode("segments", max_ops=None, cut_after_optimizer_step=True, cut_at_repetitions=True)
INSPECTED = Mode("inspected", max_ops=1, wait=True, inspect=inspect)
