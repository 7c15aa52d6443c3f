"""The environment of processes on TPU hosts, and starting them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import spawn
from tpu_core.errors import ProcessGroupError, UnknownTopologyError
from tpu_distributed.launch import slices
from tpu_distributed.launch.cli import app
from tpu_distributed.launch.environment import LaunchSpec, process_environment, settle
from tpu_distributed.launch.slices import Slice


@pytest.mark.parametrize(
    ("name", "shape", "hosts", "chips"),
    [
        ("v5e:1x1", (1, 1, 1), 1, 1),
        ("v5litepod:2x4", (2, 4, 1), 1, 8),
        ("v6e:4x4", (4, 4, 1), 4, 4),
        ("v5e:16x16", (16, 16, 1), 64, 4),
        ("v4:2x2x1", (2, 2, 1), 1, 4),
        ("V5P:2x2x2", (2, 2, 2), 2, 4),
        ("v5p:8x8x8", (8, 8, 8), 128, 4),
    ],
)
def test_hosts_of_slices(name: str, shape: tuple[int, ...], hosts: int, chips: int) -> None:
    slice = slices.parse(name)
    assert (slice.shape, slice.hosts, slice.chips_per_host) == (shape, hosts, chips)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("v5p", "'v5p' is not a slice: v5p has 3 dimensions"),
        ("v5e:2x2x2", "v5e has 2 dimensions"),
        ("v5p:0x2x2", "v5p has 3 dimensions"),
        ("v5p:2x3x1", "hosts have 2x2 chips"),
        ("tpu7x:2x2x1", "Chips with two devices"),
        ("h100:8", "Slices of 'h100' cannot be launched"),
    ],
)
def test_what_is_no_slice(name: str, problem: str) -> None:
    with pytest.raises(UnknownTopologyError, match=problem):
        slices.parse(name)


def test_two_hosts() -> None:
    slice = slices.parse("v5p:2x2x2")
    host = LaunchSpec(slice, ("a", "b")).host_environment(1)
    assert host == {
        "TPU_WORKER_ID": "1",
        "TPU_WORKER_HOSTNAMES": "a,b",
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
        "TPU_HOST_BOUNDS": "1,1,2",
    }
    assert slices.from_environment(host, 4) == slice
    assert process_environment(slice, host, 2) == {
        "TPU_VISIBLE_CHIPS": "2",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "2,2,2",
        "TPU_PROCESS_ADDRESSES": "a:8476,a:8477,a:8478,a:8479,b:8476,b:8477,b:8478,b:8479",
        "TPU_PROCESS_PORT": "8478",
        "CLOUD_TPU_TASK_ID": "6",
    }


def test_two_slices() -> None:
    job = LaunchSpec(slices.parse("v6e:4x4"), tuple("abcdefgh"))
    host = job.host_environment(5)
    assert (host["TPU_WORKER_ID"], host["TPU_WORKER_HOSTNAMES"]) == ("1", "e,f,g,h")
    megascale = {k: v for k, v in host.items() if k.startswith("MEGASCALE")}
    assert megascale == {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "a:8081",
    }
    process = process_environment(job.slice, host, 3)
    assert process["MEGASCALE_PORT"] == "8084"
    assert process["CLOUD_TPU_TASK_ID"] == "7"
    assert process["TPU_PROCESS_ADDRESSES"].startswith("e:8476,e:8477,")


def test_one_host_needs_no_environment() -> None:
    assert slices.from_environment({}, 4) == Slice((2, 2, 1), (2, 2, 1))
    assert slices.from_environment({}, 8) == Slice((2, 4, 1), (2, 4, 1))
    assert slices.from_environment({}, 3) is None
    assert slices.from_environment({"TPU_WORKER_HOSTNAMES": "a,b"}, 4) is None


def test_a_process_gets_its_chip() -> None:
    environ = {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    settle(environ, 4)
    assert environ["TPU_VISIBLE_CHIPS"] == "1"
    assert environ["TPU_PROCESS_ADDRESSES"] == (
        "localhost:8476,localhost:8477,localhost:8478,localhost:8479"
    )
    set_by_the_user = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "TPU_VISIBLE_CHIPS": "2,3"}
    for environ in (set_by_the_user, {}, {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}):
        before = dict(environ)
        settle(environ, 4)
        assert environ == before


def test_processes_that_have_no_chip() -> None:
    environ = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with pytest.raises(ProcessGroupError, match="2 processes were started on a host with 4 TPU"):
        settle(environ, 4)
    environ = {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0", "TPU_WORKER_HOSTNAMES": "a,b"}
    with pytest.raises(ProcessGroupError, match="TPU_HOST_BOUNDS: not set"):
        settle(environ, 4)


def launch(*arguments: str, **environ: str) -> Result:
    return CliRunner(env=environ).invoke(app, list(arguments))


def test_dry_run_of_a_topology() -> None:
    result = launch("--dry-run", "--topology", "v5p:2x2x2", "--slices", "2", "train.py", "--lr=1")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert sum(line.startswith("# process ") for line in lines) == 16
    assert "# process 3 of host 3, rank 15" in lines
    assert "export MEGASCALE_SLICE_ID=1" in lines
    assert "export MEGASCALE_COORDINATOR_ADDRESS=host-0:8081" in lines
    assert (
        "torchrun --nproc-per-node=4 --nnodes=4 --node-rank=3 --master-addr=host-0 "
        "--master-port=29500 train.py --lr=1"
    ) in lines
    process = lines[lines.index("# process 1 of host 2, rank 9") :]
    assert process[1:7] == [
        "TPU_VISIBLE_CHIPS=1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1",
        "TPU_PROCESS_BOUNDS=2,2,2",
        "TPU_PROCESS_ADDRESSES="
        + ",".join(f"host-{h}:{8476 + p}" for h in (2, 3) for p in range(4)),
        "TPU_PROCESS_PORT=8477",
        "CLOUD_TPU_TASK_ID=1",
    ]


def test_the_page_shows_what_is_printed() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tutorials" / "launch.md").read_text()
    (command, shown) = re.findall(r"\$ tpu (launch --dry-run .*)\n((?:.*\n)*?)\.\.\.\n", page)[0]
    result = launch(*command.split()[1:])
    assert result.output.startswith(shown)


def test_dry_run_of_one_host_and_of_this_machine() -> None:
    result = launch("--dry-run", "--topology=v5e:2x4", "--max-restarts=3", "train.py")
    assert "torchrun --nproc-per-node=8 --standalone --max-restarts=3 train.py" in result.output
    assert "# process 7 of host 0, rank 7" in result.output
    result = launch("--dry-run", "--nproc", "2", "train.py")
    assert result.output.strip() == "torchrun --nproc-per-node=2 --standalone train.py"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "Name a script"),
        (("--slices=2", "train.py"), "need a --topology"),
        (("--topology=v5p:2x2x2", "--hosts=a", "train.py"), "have 2 hosts"),
        (("--topology=v5p:2x2x2", "--hosts=a,b", "--node=2", "train.py"), "no host 2"),
    ],
)
def test_what_cannot_be_launched(arguments: tuple[str, ...], problem: str) -> None:
    result = launch(*arguments)
    assert result.exit_code == 2
    assert problem in " ".join(result.output.replace("│", " ").split())


def test_a_job_set_knows_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {}

    def execve(path: str, command: list[str], environ: dict[str, str]) -> None:
        started.update(path=path, command=command, environ=environ)

    monkeypatch.setattr("os.execve", execve)
    result = launch(
        "--topology=v6e:4x4",
        "train.py",
        TPU_WORKER_ID="2",
        TPU_WORKER_HOSTNAMES="e,f,g,h",
        MEGASCALE_NUM_SLICES="2",
        MEGASCALE_SLICE_ID="1",
        MEGASCALE_COORDINATOR_ADDRESS="a:8080",
    )
    assert result.exit_code == 0, result.output
    assert started["command"][1:] == [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=4",
        "--nnodes=8",
        "--node-rank=6",
        "--master-addr=a",
        "--master-port=29500",
        "train.py",
    ]
    environ = started["environ"]
    assert "TPU_JOB_SECRET" not in environ  # each host would make another one
    assert environ["MEGASCALE_COORDINATOR_ADDRESS"] == "a:8080"
    assert (environ["TPU_HOST_BOUNDS"], environ["TPU_WORKER_ID"]) == ("2,2,1", "2")


def test_torchrun_counts_devices() -> None:
    code = (
        "from torch.distributed.run import determine_local_world_size as count\n"
        "import tpu_core\n"
        "print(count('auto'), count('tpu'))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env=spawn.environment(TPU_NUM_DEVICES="3", TPU_PLATFORM="cpu"),
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    ).stdout
    assert printed.split() == ["3", "3"]


def test_a_script_is_started(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "import os\nimport sys\n"
        "words = [os.environ['RANK'], os.environ['WORLD_SIZE'], str(sys.argv[1:])]\n"
        "lines = ' '.join(words) + '\\nsecret ' + os.environ['TPU_JOB_SECRET'] + '\\n'\n"
        "os.write(1, lines.encode())  # at once: the ranks share a pipe\n"
    )
    command = ["-m", "tpu_distributed.launch", "--nproc", "2", str(script), "--lr", "1"]
    process = subprocess.Popen(
        [sys.executable, *command],
        env=spawn.environment(TPU_PLATFORM="cpu"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    (printed,) = spawn.finish([process], timeout=100)
    assert process.returncode == 0, printed
    assert {"0 2 ['--lr', '1']", "1 2 ['--lr', '1']"} <= set(printed.splitlines())
    first, second = re.findall(r"secret ([0-9a-f]{64})", printed)
    assert first == second
