"""Steps that PyTorch's parallelisms divide over pods compile: ``nox -s tpu_aot``.

The smallest is a part of tpu-compile's own tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "aot_distributed.py"
CASES = [
    (program, topology)
    for topology in ("v5e:16x16", "v5p:8x8x8", "tpu7x:4x4x4")
    for program in ("ddp", "fsdp2", "hsdp", "tp", "sp", "fsdp2+tp")
]
# Of what is intended, in bytes. Sums of 16 bits may be scattered in 32; XLA uses a gathered value
# twice where it can, and sums small gradients over all devices at once.
_LEAST = 0.8
_MOST = {"all-gather": 1.1, "all-reduce": 2.1, "reduce-scatter": 2.2}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("program", "topology"), CASES)
def test_the_collectives_are_those_intended(program: str, topology: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, BENCHMARK, "--only", program, "--topology", topology, "--json", file]
    subprocess.run(list(map(str, command)), check=True)
    (result,) = json.loads(file.read_text()).values()
    assert result["fits"]
    found = {(c["kind"], c["axis"]): c["bytes"] for c in result["collectives"]}
    for wanted in result["intended"]:
        kind, axis = wanted["kind"], wanted["axis"]
        is_summed = (program, topology) == ("hsdp", "tpu7x:4x4x4") and kind != "all-gather"
        if is_summed or (program.startswith("fsdp2") and axis == "data"):
            # libtpu may sum over all chips where it is to scatter, or to gather a few rows a chip.
            assert any(c["axis"] in (axis, "all") for c in result["collectives"])
            continue
        assert _LEAST < found[kind, axis] / wanted["bytes"] < _MOST[kind], (kind, axis)
    assert not any(c["kind"] == "all-to-all" for c in result["collectives"])
