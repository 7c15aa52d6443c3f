"""``tpu cache warm --topology``: a script's programs compiled for TPUs by libtpu."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
w = torch.nn.Parameter(torch.ones(8, 2, device="tpu"))
for n in (3, 5):
    (torch.ones(n, 8, device="tpu") @ w).square().sum().backward()
print("gradient", w.grad.sum().item())
x = torch.ones(256, 64, device="tpu", requires_grad=True)
(x @ w.detach().repeat(8, 1))[:, 0].sum().backward()
print("padded constant", x.grad.sum().item())
"""


def tpu(*arguments: object, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tpu_core", *map(str, arguments)],
        env={**os.environ, "TPU_CACHE_DIR": str(cache), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


def test_a_script_is_compiled_for_a_topology(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = tpu("cache", "warm", "--topology", "v5e:2x4", script, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert "gradient 2048.0" in done.stdout
    assert "padded constant 16384.0" in done.stdout  # libtpu refuses it unless it is hidden
    line = next(line for line in done.stderr.splitlines() if line.startswith("v5e:2x4: "))
    (kept,) = re.findall(r"(\d+) of \d+ programs are in", done.stderr)
    assert line.startswith(f"v5e:2x4: {kept} programs") and line.endswith("; 0 failed.")


def test_an_unknown_topology_is_refused(tmp_path: Path) -> None:
    done = tpu("cache", "warm", "--topology", "v5x:1x1", "script.py", cache=tmp_path)
    assert done.returncode and "there is no generation 'v5x'" in done.stderr
    assert "Traceback" not in done.stderr
