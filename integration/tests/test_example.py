"""The example trains on any device, with options of its own and results on disk."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "train_char_gpt.py"
SMALL = "--layers 1 --dim 32 --heads 2 --seq 32 --batch-size 4 --sample 8 --log-every 5".split()


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_char_gpt", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_loss_falls_and_results_are_written(
    example: ModuleType, device: str, tmp_path: Path
) -> None:
    options = ["--device", device, "--steps", "30", "--lr", "0.01", "--out", str(tmp_path)]
    before = torch.tpu.metrics()["fallbacks"]  # of other tests in this process
    result = example.main([*SMALL, *options])
    assert result["held_out_loss"] < result["first_loss"] - 0.5
    assert result["fallbacks"] - (before if device == "tpu" else 0) == 0
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(result))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_devices_agree(example: ModuleType, tmp_path: Path) -> None:
    losses = {}
    for device in ("cpu", "tpu"):
        options = ["--device", device, "--steps", "11", "--sample", "0", "--out", str(tmp_path)]
        losses[device] = example.main([*SMALL, *options])["history"]["train"]
    for (step, cpu), (other, tpu) in zip(losses["cpu"], losses["tpu"], strict=True):
        assert step == other
        assert tpu == pytest.approx(cpu, abs=1e-3)


def test_the_script_runs_where_the_device_is_not_installed(tmp_path: Path) -> None:
    options = [*SMALL, "--steps", "2", "--out", str(tmp_path)]
    result = subprocess.run(
        [sys.executable, SCRIPT, *options],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert json.loads((tmp_path / "summary.json").read_text())["platform"] == "cpu"
    assert "held-out loss" in result.stdout
