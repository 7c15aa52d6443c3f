"""Counters and reports: `torch.tpu.metrics` and `torch.tpu.compile_report`."""

from __future__ import annotations

from typing import Any


def metrics() -> dict[str, float]:
    """Counters since the start or the last `reset_metrics`; `tpu_core.metrics.COUNTERS` explains
    them.
    """
    from tpu_core.metrics import METRICS

    return METRICS.snapshot()


def reset_metrics() -> None:
    """Set every counter to zero."""
    from tpu_core.metrics import METRICS

    METRICS.reset()


def compile_report() -> Any:
    """A table of compiles with their reasons, cache hits, fallbacks and host syncs; print it."""
    from tpu_core.metrics import METRICS

    return METRICS.report()
