"""The programs of the tutorials print what the pages show, in processes that are really killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import spawn
from tpu_distributed.flight_records.cli import app

PAGES = Path(__file__).parents[3] / "docs" / "tutorials"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
SECONDS = 150


def program(page: str, folder: Path, number: int = 0) -> Path:
    """A program of a page, as a file."""
    text = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)[number]
    script = folder / "train.py"
    # Not needed where the package is installed rather than on the path.
    script.write_text(f"{spawn.REGISTER}\n{text}")
    return script


def sessions(page: str) -> list[str]:
    """What a page shows of the terminal."""
    return re.findall(r"```console\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


def start(folder: Path, *command: str | Path) -> subprocess.Popen[str]:
    """A Python command in a folder; what it prints is added to `printed`."""
    with (folder / "printed").open("a") as printed:
        return subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=spawn.environment(TPU_FLIGHT_DIR=str(folder / "flights")),
            cwd=folder,
            stdout=printed,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def printed(folder: Path) -> str:
    return (folder / "printed").read_text()


def wait_for(folder: Path, line: str) -> None:
    deadline = time.monotonic() + SECONDS
    while line not in printed(folder):
        assert time.monotonic() < deadline, printed(folder)
        time.sleep(0.02)


def without_numbers(text: str) -> set[str]:
    """Lines of the program, without the numbers of processes, which differ from run to run."""
    # Not always at the start of a line: what libraries log comes in pieces.
    return set(re.findall(r"rank \d of \d is process|step \d+: loss .*", text))


@pytest.mark.parametrize(
    ("way", "processes"),
    [
        ("no", 1),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, marks=pytest.mark.slow),
        ("fsdp+tp", 4),
    ],
)
def test_from_one_chip_to_many(way: str, processes: int, tmp_path: Path) -> None:
    script = program("distributed.md", tmp_path)
    shown = dict(
        re.findall(
            r"train\.py(?: --parallel (\S+))?\n(loss: .*)", "".join(sessions("distributed.md"))
        )
    )
    launcher = () if processes == 1 else (*TORCHRUN, f"--nproc-per-node={processes}")
    options = () if processes == 1 else ("--parallel", way)
    process = start(tmp_path, *launcher, script, *options)
    spawn.finish([process], timeout=SECONDS)
    assert process.returncode == 0, printed(tmp_path)
    losses = re.findall(r"^loss: .*", printed(tmp_path), re.MULTILINE)
    assert losses == [shown[way if processes > 1 else ""]]


def test_survivors_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    script = program("survive-a-lost-host.md", tmp_path)
    processes = [start(tmp_path, script) for _ in range(3)]
    try:
        wait_for(tmp_path, "step 10:")
        (lost,) = re.findall(r"rank 0 of 3 is process (\d+)", printed(tmp_path))
        os.kill(int(lost), signal.SIGKILL)
        for rank in (1, 2):
            wait_for(tmp_path, f"rank-{rank}.json\n  missing: rank 0")
    finally:
        spawn.finish(processes, timeout=SECONDS)
    assert sorted(p.returncode for p in processes) == [-9, 0, 0], printed(tmp_path)
    started, _, went_on = sessions("survive-a-lost-host.md")[:3]
    assert without_numbers(printed(tmp_path)) == without_numbers(started + went_on)
    (folder,) = (tmp_path / "flights").iterdir()
    table = CliRunner().invoke(app, [str(folder), "--last", "2"]).output
    assert "rank 0 left no dump" in table
    failed = r"\d+ +all_gather_into_tensor float32\[132\] +1-2 +failed +.*train.py:\d+ in train"
    assert re.search(failed, table), table


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_that_differ(number: int, tmp_path: Path) -> None:
    process = start(tmp_path, *TORCHRUN, "--nproc-per-node=2", program("mpmd.md", tmp_path, number))
    spawn.finish([process], timeout=SECONDS)
    assert process.returncode == 0, printed(tmp_path)
    shown = re.findall(r"```text\n(.*?)```", (PAGES / "mpmd.md").read_text(), re.DOTALL)[number]
    # The ranks print in any order.
    assert set(shown.splitlines()) <= set(printed(tmp_path).splitlines()), printed(tmp_path)


@pytest.mark.slow
def test_torchrun_starts_all_again(tmp_path: Path) -> None:
    script = program("survive-a-lost-host.md", tmp_path)
    process = start(tmp_path, *TORCHRUN, "--nproc-per-node=2", "--max-restarts=1", script)
    try:
        wait_for(tmp_path, "step 10:")
        (lost,) = re.findall(r"rank 1 of 2 is process (\d+)", printed(tmp_path))
        os.kill(int(lost), signal.SIGKILL)
    finally:
        spawn.finish([process], timeout=SECONDS)
    assert process.returncode == 0, printed(tmp_path)
    shown = sessions("survive-a-lost-host.md")[3]
    assert without_numbers(printed(tmp_path)) == without_numbers(shown)
    assert printed(tmp_path).count("is process") == 4
