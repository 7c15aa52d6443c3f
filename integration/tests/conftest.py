"""Programs across packages are compiled by the emitters that users have."""

from __future__ import annotations

import os


def pytest_configure() -> None:
    # Before the root's own, which leaves what is set.
    if os.environ.get("TPU_PLATFORM", "cpu") in ("cpu", "auto"):
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
