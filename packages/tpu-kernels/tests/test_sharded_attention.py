"""Attention's kernels in programs for several devices: values on four CPU devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Modules with a `main` that prints what it has compared.
CHECKS = "import sharded_attention, sharded_pages; sharded_attention.main(); sharded_pages.main()"
# What XLA takes for the machine's code to be fast is more than what it saves here.
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


def test_values_and_gradients_of_divided_batches_and_heads() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CHECKS],
        env={**os.environ, "XLA_FLAGS": FLAGS},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines() == [
        "attention, batches",
        "attention, batches and heads",
        "attention, lengths",
        "paged attention, sequences and heads",
        "ragged paged attention, heads",
    ]
