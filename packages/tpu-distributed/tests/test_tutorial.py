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
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    process = subprocess.Popen(
        [sys.executable, *command],
        env=spawn.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    (printed,) = spawn.finish([process], timeout=150)
    assert process.returncode == 0, printed
    assert expected in printed
