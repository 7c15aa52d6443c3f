"""Attention's kernels in programs for several devices: values on four CPU devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("divided_attention.py")


def test_values_and_gradients_of_divided_batches_and_heads() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    result = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines() == ["batches", "batches and heads", "lengths"]
