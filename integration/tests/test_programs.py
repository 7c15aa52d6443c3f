"""Programs as people write them compute on the device what they compute on the CPU."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from torch.testing import assert_close

import programs

STEPS = 5
# Relative. The host tier runs the reference's kernels; PyTorch composes some ops on one device that
# have a kernel on the other.
ROUNDING = 1e-5
# Autocast on the device follows the lists of CUDA, with losses in float32; on the CPU those are in
# bfloat16, and training goes apart from there.
TOLERANCES = {"cnn_amp": 2e-2}
# XLA sums in other orders than the CPU's kernels; what a line search or a discriminator does with
# that is more than rounding.
OF_PROGRAMS = {**dict.fromkeys(programs.NAMES, 1e-4), **TOLERANCES, "pinn": 2e-3, "gan": 2e-3}

# What users have, where nothing is set; the tests around these have programs alone.
DEFAULT: dict[str, str] = {}
RESTLESS = {"TPU_TIERS": "auto", "TPU_TIER_PATIENCE": "1e-9", "TPU_COMPILE": "blocking"}
COMPILED = {"TPU_TIERS": "compiled", "TPU_COMPILE": "blocking"}

WORKER = """
import json, sys, traceback
from itertools import islice
import programs
for line in sys.stdin:
    name, steps = json.loads(line)
    try:
        answer = [float(x) for x in islice(programs.start(name, "tpu"), steps)]
    except Exception:
        answer = traceback.format_exc()
    print(json.dumps(answer), flush=True)
"""


class Worker:
    """A process with settings of its own, started when it is first asked."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def numbers(self, name: str, settings: dict[str, str]) -> list[float]:
        key = json.dumps(settings)
        if key not in self.processes:
            others = {k: v for k, v in os.environ.items() if not k.startswith("TPU_")}
            folders = {
                "TPU_CACHE_DIR": os.environ["TPU_CACHE_DIR"],
                "PYTHONPATH": str(Path(__file__).parents[1]),
            }
            self.processes[key] = subprocess.Popen(
                [sys.executable, "-c", WORKER],
                env={**others, **folders, "OMP_NUM_THREADS": "1", **settings},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process = self.processes[key]
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps([name, STEPS]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            del self.processes[key]
            pytest.fail(f"{name} ended its process with {process.wait()}")
        answer = json.loads(line)
        if isinstance(answer, str):
            pytest.fail(answer)
        return answer

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@functools.cache
def on_the_cpu(name: str) -> list[float]:
    return [float(x) for x in islice(programs.start(name, "cpu"), STEPS)]


@pytest.mark.parametrize("name", programs.NAMES)
def test_numbers_by_default(name: str, worker: Worker) -> None:
    ours = worker.numbers(name, DEFAULT)
    assert_close(ours, on_the_cpu(name), rtol=TOLERANCES.get(name, ROUNDING), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [RESTLESS, COMPILED], ids=["at the third time", "alone"])
@pytest.mark.parametrize("name", programs.NAMES)
def test_numbers_by_programs(name: str, settings: dict[str, str], worker: Worker) -> None:
    ours = worker.numbers(name, settings)
    assert_close(ours, on_the_cpu(name), rtol=OF_PROGRAMS[name], atol=1e-5)
