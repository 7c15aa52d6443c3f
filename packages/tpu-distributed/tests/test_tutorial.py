"""The program of the tutorial prints what the page shows, under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import spawn

PAGE = Path(__file__).parents[3] / "docs" / "tutorials" / "distributed.md"


def test_program_of_the_tutorial(tmp_path: Path) -> None:
    text = PAGE.read_text()
    program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    (expected,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    script = tmp_path / "train.py"
    # Not needed where the package is installed rather than on the path.
    script.write_text(f"{spawn.REGISTER}\n{program}")
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", str(script)]
    result = subprocess.run(
        [sys.executable, *command],
        env=spawn.environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert expected in result.stdout
