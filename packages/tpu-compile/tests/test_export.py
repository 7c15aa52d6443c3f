"""Exported programs run in JAX without PyTorch, and as callables on the device."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.numpy import load_file
from torch.export import Dim

from tpu_compile import export
from tpu_core.errors import ExportError

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning")


class Model(nn.Module):
    """Attention, sizes that are computed with, tied weights, and a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        x = self.embed(tokens)
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[
            :, 0
        ].reshape(x.shape)
        x = (x * scale)[:, 1:] / tokens.shape[1]
        return {"logits": self.head(x), "flat": x.flatten(1), "calls": self.calls * 1}


TOKENS = torch.randint(11, (3, 5))
SCALE = torch.tensor(1.5)


def exported(dynamic: bool = False, device: str = "cpu") -> torch.export.ExportedProgram:
    shapes = {"tokens": {0: Dim("b", max=64), 1: Dim("s", min=3, max=64)}, "scale": None}
    inputs = (TOKENS.to(device),), {"scale": SCALE.to(device)}
    model = Model().to(device).eval()
    return torch.export.export(model, *inputs, dynamic_shapes=shapes if dynamic else None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.export.ExportedProgram]:
    torch.manual_seed(0)
    program = exported(dynamic=True)
    folder = tmp_path_factory.mktemp("model")
    export.save(program, folder)
    return folder, program


def test_jax_runs_it_without_pytorch(
    saved: tuple[Path, torch.export.ExportedProgram], tmp_path: Path
) -> None:
    folder, program = saved
    longer = torch.randint(11, (2, 9))
    np.savez(tmp_path / "inputs.npz", a=TOKENS.numpy(), b=longer.numpy(), scale=SCALE.numpy())
    script = textwrap.dedent("""
        import sys
        for name in ("torch", "tpu_core"):
            sys.modules[name] = None  # importing it fails
        import numpy as np
        from tpu_compile.export import with_jax
        program = with_jax.load(sys.argv[1])
        inputs = np.load(sys.argv[2] + "/inputs.npz")
        names = [o["name"] for o in program.manifest["outputs"]]
        made = {
            f"{tokens}{i}": np.asarray(y)
            for tokens in "ab"
            for i, y in enumerate(program(inputs[tokens], inputs["scale"]))
        }
        np.savez(sys.argv[2] + "/outputs.npz", **made)
    """)
    run = [sys.executable, "-c", script, str(folder), str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    made = np.load(tmp_path / "outputs.npz")
    model = program.module()
    for i, tokens in enumerate((TOKENS, longer)):
        want = model(tokens, scale=SCALE)
        # The first output is the new value of the buffer, which JAX's caller has to keep.
        results = [made[f"{'ab'[i]}{n}"] for n in range(1, 4)]
        for got, key in zip(results, ("logits", "flat"), strict=False):
            np.testing.assert_allclose(got, want[key].detach().numpy(), rtol=1e-4, atol=1e-5)
        assert made[f"{'ab'[i]}0"] == 1


def test_a_callable_on_the_device(saved: tuple[Path, torch.export.ExportedProgram]) -> None:
    folder, program = saved
    run = export.load(folder)
    model = program.module()
    before = int(model(TOKENS, scale=SCALE)["calls"])
    for calls, tokens in enumerate((TOKENS, torch.randint(11, (4, 7))), start=1):
        got = run(tokens.to("tpu"), scale=SCALE.to("tpu"))
        want = model(tokens, scale=SCALE)
        assert got.keys() == want.keys()
        for key in ("logits", "flat"):
            torch.testing.assert_close(got[key].cpu(), want[key].detach(), rtol=1e-4, atol=1e-5)
        assert got["calls"].item() == calls
        assert want["calls"].item() == before + calls
    assert run.weights["calls"].item() == 2


def test_it_is_recorded_with_the_ops_around_it(
    saved: tuple[Path, torch.export.ExportedProgram],
) -> None:
    run = export.load(saved[0])
    tokens, scale = TOKENS.to("tpu"), SCALE.to("tpu")

    def step() -> torch.Tensor:
        return run(tokens, scale=scale * 2)["logits"].sum()

    with torch.tpu.set_eager_mode("fused"):
        step().item()
        torch.tpu.synchronize()
        before = torch.tpu.metrics()["executions"]
        step().item()
        assert torch.tpu.metrics()["executions"] == before + 1


def test_tied_weights_are_stored_once(saved: tuple[Path, torch.export.ExportedProgram]) -> None:
    folder, _ = saved
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {w["tensor"] for w in manifest["weights"]} == set(
        load_file(folder / "weights.safetensors")
    )
    assert len(manifest["weights"]) >= len(load_file(folder / "weights.safetensors"))
    assert manifest["inputs"][0]["dtype"] == "int64"
    assert all(isinstance(n, str) for n in manifest["inputs"][0]["shape"])
    assert "stablehlo" in (folder / "program.stablehlo.mlir").read_text()


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_weights_inside_and_fixed_sizes(device: str, tmp_path: Path) -> None:
    program = exported(device=device)
    export.save(program, tmp_path, weights="inside", platforms=["cpu"])
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "manifest.json",
        "program.stablehlo.bc",
        "program.stablehlo.mlir",
    ]
    run = export.load(tmp_path)
    got = run(TOKENS.to("tpu"), scale=SCALE.to("tpu"))["logits"]
    want = program.module()(TOKENS.to(device), scale=SCALE.to(device))["logits"]
    torch.testing.assert_close(got.cpu(), want.detach().cpu(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ExportError, match="do not fit the exported program"):
        run(TOKENS[:2].to("tpu"), scale=SCALE.to("tpu"))
    with pytest.raises(ExportError, match="not structured as those that were exported"):
        run(TOKENS.to("tpu"), SCALE.to("tpu"))


class Unique(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.unique(x).sum()


class Dynamic(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool1d(x[None], 3)


@pytest.mark.parametrize(
    "model, message",
    [
        (Unique(), r"(?s)unique.*has no lowering.*test_export.py"),
    ],
)
def test_what_cannot_be_exported(model: nn.Module, message: str, tmp_path: Path) -> None:
    program = torch.export.export(model, (torch.randn(4, 2),))
    with pytest.raises(ExportError, match=message):
        export.save(program, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_sizes_that_jax_cannot_express(tmp_path: Path) -> None:
    shapes = ({1: Dim("n", min=4, max=64)},)
    program = torch.export.export(Dynamic(), (torch.randn(2, 6),), dynamic_shapes=shapes)
    with pytest.raises(ExportError, match=r"(?s)cannot be exported.*fixed sizes"):
        export.save(program, tmp_path)


def test_a_folder_that_is_no_program(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="is no exported program"):
        export.load(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(ExportError, match="has format 99"):
        export.load(tmp_path)


def test_a_word_that_weights_do_not_know(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'beside' or 'inside'"):
        export.save(exported(), tmp_path, weights="elsewhere")
