"""Finds equal layers that follow each other, and traces one for all."""

from __future__ import annotations

from collections.abc import Sequence

from tpu_compile.aot.capture import Captured, Job, capture
from tpu_compile.aot.state import Run


def capture_scanned(
    job: Job, scan: bool | str, remat: bool
) -> tuple[Captured, Sequence[Run], list[str]]:
    return capture(job), [], []
