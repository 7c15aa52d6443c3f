"""Every model compiles ahead of time for TPU topologies: ``nox -s tpu_aot``.

The ordinary tests compile the smallest of them; all take ten minutes.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from training import JOBS

import tpu_compile

TOPOLOGIES = ("v5e:2x2", "tpu7x:2x2x1")
CASES = [
    pytest.param(
        name,
        topology,
        part,
        marks=[] if (name, topology, part) == ("mlp", "v5e:2x2", "step") else pytest.mark.slow,
    )
    for name in JOBS
    for topology in TOPOLOGIES
    for part in ("forward", "step")
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "topology", "part"), CASES)
def test_models_compile(name: str, topology: str, part: str) -> None:
    job = JOBS[name]
    batch = job.batch(torch.Generator().manual_seed(0))
    batch = tuple(x.to(job.dtype) if x.is_floating_point() else x for x in batch)
    batch = tuple(torch.cat([x, x]) for x in batch)  # a row for each of 8 devices at least
    with torch.device("meta"):
        model = job.model().to(job.dtype)

    def loss(model: Any, *batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("tpu", torch.bfloat16, enabled=job.autocast):
            return model.loss(*batch)

    if part == "forward":
        plan = tpu_compile.aot(model.eval(), batch[:1], topology=topology)
    else:
        plan = tpu_compile.aot(
            model,
            batch,
            topology=topology,
            loss=loss,
            optimizer=lambda p: job.optimizer(list(p)),
        )
    assert plan.fits and plan.executable
    assert plan.cost is not None and plan.cost.flops > 0
    aliased = plan.memory.aliased
    assert aliased is not None and (aliased > 0) is (part == "step")


def test_the_command_has_the_subcommand() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tpu_core", "aot", "--help"], text=True, capture_output=True
    )
    assert result.returncode == 0, result.stderr
    assert "--topology" in result.stdout
