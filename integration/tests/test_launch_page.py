"""The manifests of the page on launching are valid YAML and agree with the slices they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tpu_distributed import job_secret
from tpu_distributed.launch import slices
from tpu_distributed.launch.environment import MEGASCALE_PORT, PORT

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "launch.md").read_text()
JOB_SET, SECRET, RAY_JOB = (
    yaml.safe_load(t) for t in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
)
SLICE = slices.parse("v6e:4x4")


def pod_fits(pod: dict[str, Any]) -> None:
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["google.com/tpu"] == SLICE.chips_per_host


def test_job_set() -> None:
    (job,) = JOB_SET["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == SLICE.hosts
    pod_fits(spec["template"]["spec"])
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == ["tpu", "launch", "--topology", "v6e:4x4", "train.py"]
    ports = {port["containerPort"] for port in container["ports"]}
    chips = range(SLICE.chips_per_host)
    assert ports == {29500, *(PORT + i for i in chips), *(MEGASCALE_PORT + i for i in chips)}


def test_secret() -> None:
    (variable,) = SECRET["env"]
    assert variable["name"] == job_secret.VARIABLE
    assert set(variable["valueFrom"]["secretKeyRef"]) == {"name", "key"}


def test_ray_job() -> None:
    (group,) = RAY_JOB["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["numOfHosts"] == SLICE.hosts
    pod_fits(group["template"]["spec"])
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    compile(program, "submit.py", "exec")
    assert f"num_workers={SLICE.hosts}," in program
    assert RAY_JOB["spec"]["entrypoint"] == "python submit.py"
