"""Programs loaded from disk by a second process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
x = torch.arange(16.0).reshape(4, 4) + 5 * torch.eye(4)
y = torch.linalg.cholesky((x @ x.T).to("tpu")).sum() + torch.linalg.det(x.to("tpu"))
print(round(y.item(), 2), torch.tpu.metrics()["compiles"] == 0)
"""


def run(folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TPU_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_second_process_compiles_nothing_factorizations_included(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first, second = run(folder), run(folder)
    assert first[0] == second[0]
    assert (first[1], second[1]) == ("False", "True")
