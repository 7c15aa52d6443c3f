"""The programs of the tutorials print what the pages show, under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import spawn

TUTORIALS = Path(__file__).parents[3] / "docs" / "tutorials"


@pytest.mark.parametrize(("page", "number"), [("distributed", 0), ("mpmd", 0), ("mpmd", 1)])
def test_program_of_the_tutorial(page: str, number: int, tmp_path: Path) -> None:
    text = (TUTORIALS / f"{page}.md").read_text()
    program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]
    expected = re.findall(r"```text\n(.*?)```", text, re.DOTALL)[number]
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
    # The ranks print in any order.
    assert set(expected.splitlines()) <= set(printed.splitlines()), printed
