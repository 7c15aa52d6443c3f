"""Plans as libtpu makes them, without a TPU; and what goes wrong on the way."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from typer.testing import CliRunner

import tpu_compile
from tpu_compile.aot import process
from tpu_compile.aot.api import STAGES
from tpu_compile.aot.cli import app
from tpu_core.errors import (
    DataDependentError,
    LibtpuMissingError,
    MeshError,
    TopologyCompilationError,
    TpuNotAvailableError,
)

SCRIPT = """
import torch, torch.nn as nn

def aot():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128))
        x = torch.empty(64, 256)
    rules = {"0.*": ("model",), "2.weight": (None, "model")}
    return {"model": model, "example_args": (x,), "shardings": rules}

def wrong():
    return None
"""


def on_meta(*sizes: int) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])]
        return nn.Sequential(*layers), torch.empty(64, sizes[0])


def tpu(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the command writes for a forward pass on 2 x 2 devices."""
    folder = tmp_path_factory.mktemp("aot")
    names = {"json": "plan.json", "html": "plan.html", "save": "plan.tpu"}
    made = {option: folder / name for option, name in names.items()}
    script = folder / "script.py"
    script.write_text(SCRIPT)
    options = [part for option, path in made.items() for part in (f"--{option}", str(path))]
    result = tpu(str(script), "--topology", "v5e:2x2", "--mesh", "data=2,model=2", *options)
    assert result.exit_code == 0, result.output
    assert "forward of Sequential on v5e:2x2 (data=2, model=2)" in result.output
    # Progress in lines where stderr is no terminal, and none of it on stdout.
    lines = [line for line in result.stderr.splitlines() if line.startswith("[")]
    assert [line.split(" s  ")[1] for line in lines] == list(STAGES)
    assert [line.split("]")[0] for line in lines] == [f"[{i}/4" for i in range(1, 5)]
    assert lines[0] not in result.stdout
    assert "\x1b" not in result.stderr
    return {**made, "script": script}


def test_the_plan_counts_memory_products_and_collectives(files: dict[str, Path]) -> None:
    plan = json.loads(files["json"].read_text())
    assert plan["devices"] == 4
    sizes = {i["name"]: i["bytes"] for i in plan["inputs"]}
    assert sizes == {
        "0.weight": 512 * 256 * 4 // 2,
        "0.bias": 512 * 4 // 2,
        "2.weight": 512 * 128 * 4 // 2,
        "2.bias": 128 * 4,
        "batch.0": 64 * 256 * 4 // 2,
    }
    assert plan["model_flops"] == 2 * 64 * (256 * 512 + 512 * 128)
    assert plan["cost"]["product_flops"] == plan["model_flops"] / 4
    # Columns, then rows: one sum over the model axis.
    (collective,) = plan["cost"]["collectives"]
    assert (collective["kind"], collective["group"]) == ("all-reduce", 2)
    assert collective["bytes"] == 32 * 128 * 4
    memory = plan["memory"]
    assert memory["fits"] and memory["arguments"] >= sum(sizes.values())
    assert plan["roofline"]["step"] > 0 and 0 < plan["mfu"] <= 1
    assert any("float32" in line for line in plan["advice"])


def test_the_page_is_one_file(files: dict[str, Path]) -> None:
    page = files["html"].read_text()
    assert page.startswith("<!doctype html>") and "all-reduce" in page
    assert "http" not in page


def test_a_saved_plan_is_read_back(files: dict[str, Path]) -> None:
    saved = tpu_compile.aot.load(files["save"])
    assert saved.plan == json.loads(files["json"].read_text())
    assert saved.executable and "ENTRY" in saved.hlo
    with pytest.raises(TpuNotAvailableError, match="An executable for v5e:2x2 needs TPUs"):
        saved.to_devices()


def test_a_training_step_on_two_devices_a_chip_donates_what_it_updates() -> None:
    model, x = on_meta(128, 128)
    plan = tpu_compile.aot(
        model,
        (x,),
        topology="tpu7x:2x2x1",
        shardings=tpu_compile.aot.fsdp("data"),
        loss=lambda m, x: F.mse_loss(m(x), x),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )
    assert plan.program == "training step" and plan.devices == 8
    assert plan.memory.aliased == 2 * (128 * 128 * 4 // 8 + 512)  # a bias fills a tile
    kinds = {i.kind: i.spec for i in plan.inputs if i.shape == (128, 128)}
    assert kinds["parameter"] == kinds["optimizer state"] == ("data", None)
    assert "fits" in str(plan)


def test_what_does_not_fit_is_reported_with_how_much_is_missing() -> None:
    model, x = on_meta(65536, 65536)
    plan = tpu_compile.aot(model, (x,), topology="v5e:2x2")
    assert not plan.fits and plan.cost is None
    assert plan.memory.missing > 0
    assert "does not fit" in str(plan) and "too much" in str(plan)
    with pytest.raises(ValueError, match="there is no executable"):
        plan.save("nowhere")


def test_a_program_that_ends_libtpu_is_an_error_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = (
        "import os; print('F0101 shape_util.cc:1 Check failed: too large', flush=True); os.abort()"
    )
    monkeypatch.setattr(process, "_command", lambda folder: [sys.executable, "-c", code])
    model, x = on_meta(8, 8)
    with pytest.raises(TopologyCompilationError, match=r"v5e:2x2 \(SIGABRT\)[\s\S]*Check failed"):
        tpu_compile.aot(model, (x,))


def test_a_worker_that_is_killed_is_told_from_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(process, "_command", lambda folder: [sys.executable, "-c", code])
    model, x = on_meta(8, 8)
    with pytest.raises(TopologyCompilationError, match="ran out of memory"):
        tpu_compile.aot(model, (x,))


def test_without_libtpu_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    model, x = on_meta(8, 8)
    with pytest.raises(LibtpuMissingError, match=r'pip install "tpu-compile\[aot\]"'):
        tpu_compile.aot(model, (x,))


def test_a_read_of_values_is_named_with_its_line() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    line = Model.forward.__code__.co_firstlineno + 1
    with pytest.raises(DataDependentError, match=rf"test_aot_plan.py:{line} in forward"):
        tpu_compile.aot(Model(), (torch.empty(8),))


def test_a_batch_that_the_mesh_does_not_divide_is_an_error() -> None:
    model, x = on_meta(8, 8)
    with pytest.raises(MeshError, match=r"Dimension 0 of 'batch.0' has 64 elements, which 128"):
        tpu_compile.aot(model, (x,), topology="v5p:4x4x8")


def test_an_optimizer_of_other_parameters_is_an_error() -> None:
    model, x = on_meta(8, 8)
    other = torch.optim.SGD(on_meta(8, 8)[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="2 parameters of the optimizer are not the model's"):
        tpu_compile.aot(model, (x,), optimizer=other, loss=lambda m, x: m(x).sum())


def test_a_loss_with_dimensions_is_an_error() -> None:
    model, x = on_meta(8, 8)
    with pytest.raises(TypeError, match=r"The loss is \[64, 8\]"):
        tpu_compile.aot(model, (x,), loss=lambda m, x: m(x))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no_such_module"], "neither a file nor a module"),
        (["json"], "has no function 'aot'"),
        (["{script}:wrong"], "returned no mapping"),
        (["{script}", "--mesh", "data:2"], "is not a mesh"),
    ],
)
def test_the_command_says_what_it_wants(
    files: dict[str, Path], arguments: list[str], told: str
) -> None:
    result = tpu(*(a.format(script=files["script"]) for a in arguments))
    assert result.exit_code == 2
    assert told in " ".join(result.output.replace("│", " ").split())


def test_a_v4_is_planned_by_its_cores() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(128, 128, bias=False), torch.empty(16, 128)
    plan = tpu_compile.aot(model, (x,), topology="v4:2x2x1")
    assert plan.devices == 8 and plan.fits
