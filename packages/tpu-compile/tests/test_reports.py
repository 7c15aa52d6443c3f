"""What `TPU_DUMP`, `TORCH_LOGS` and `TORCH_TRACE` show of compiled functions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import torch
x = torch.ones(3, device="tpu", requires_grad=True)
torch.compile(lambda x: torch.sin(x) * 2)(x).sum().backward()
x.grad.cpu()
"""


pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.11 reads TORCH_LOGS before it loads the device"
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with files and trace, and what was printed."""
    folder = tmp_path_factory.mktemp("shown")
    variables = {
        "TPU_DUMP": str(folder / "dump"),
        "TPU_CACHE": "off",
        "TORCH_TRACE": str(folder / "trace"),
        "TORCH_LOGS": "tpu_graphs,stablehlo",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stderr


def test_files(shown: tuple[Path, str]) -> None:
    files = {f.name: f.read_text() for f in (shown[0] / "dump").iterdir()}
    graphs = sorted(name for name in files if name.endswith(".py"))
    assert graphs == ["graph_0_frame0.0_forward.py", "graph_1_frame0.0_backward.py"]
    assert "torch.ops.aten.sin.default" in files[graphs[0]]
    programs = [name.split(".")[0] for name in files if name.endswith(".stablehlo.mlir")]
    assert programs
    for program in programs:
        assert "stablehlo" in files[f"{program}.stablehlo.mlir"]
        assert "HloModule" in files[f"{program}.optimized.hlo.txt"]
    whole = "".join(files[f"{p}.stablehlo.mlir"] for p in programs)
    assert "// tpu_compile.graph  <string>:4" in whole


def test_logs(shown: tuple[Path, str]) -> None:
    assert "[0/0] forward graph" in shown[1]
    assert "backward graph" in shown[1]
    assert "torch.ops.aten.cos.default" in shown[1]
    assert "stablehlo.sine" in shown[1]


def test_structured_trace(shown: tuple[Path, str]) -> None:
    trace = "".join(f.read_text() for f in (shown[0] / "trace").iterdir())
    for name in ('"tpu_forward_graph"', '"tpu_backward_graph"', '"tpu_stablehlo_'):
        assert name in trace
