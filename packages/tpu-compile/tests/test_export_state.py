"""Exported programs that write their inputs and buffers, or draw random numbers."""

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
from torch.export import Dim

from tpu_compile import export
from tpu_compile.export import with_jax

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning")


class Cache(nn.Module):
    """Writes a part of one input and all of another, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(
        self, cache: torch.Tensor, x: torch.Tensor, total: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        cache[:, 1:3] = x
        total.add_(x.sum())
        return cache.sum(0) + x[:, :1].mean(), total * 2


class Dropped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(x, 0.5) + torch.randn_like(x)
        return F.dropout(hidden, 0.25)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return y


def saved(model: nn.Module, inputs: tuple[torch.Tensor, ...], folder: Path, **options: Any) -> None:
    export.save(torch.export.export(model, inputs, **options), folder)


def in_jax_alone(folder: Path, arrays: dict[str, Any], call: str) -> dict[str, Any]:
    """What a process without torch computes: ``call`` gives a list of arrays."""
    np.savez(folder / "inputs.npz", **arrays)
    script = textwrap.dedent(f"""
        import sys
        for name in ("torch", "tpu_core"):
            sys.modules[name] = None  # importing it fails
        import numpy as np
        from tpu_compile.export import with_jax
        program = with_jax.load(sys.argv[1])
        given = np.load(sys.argv[1] + "/inputs.npz")
        np.savez(sys.argv[1] + "/outputs.npz", *map(np.asarray, {call}))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return dict(np.load(folder / "outputs.npz"))


def test_inputs_that_are_written(tmp_path: Path) -> None:
    shapes = ({0: Dim("b", min=2, max=64)}, {0: Dim("b", min=2, max=64)}, None)
    inputs = torch.randn(3, 5), torch.randn(3, 2), torch.randn(())
    saved(Cache(), inputs, tmp_path, dynamic_shapes=shapes)
    outputs = json.loads((tmp_path / "manifest.json").read_text())["outputs"]
    assert [o["writes"] for o in outputs] == [
        {"buffer": "calls"},
        {"input": "cache"},
        {"input": "total"},
        None,
        None,
    ]
    model, run = Cache(), export.load(tmp_path)
    for b in (3, 4):
        here = [torch.randn(b, 5), torch.randn(b, 2), torch.randn(())]
        there = [t.to("tpu") for t in here]
        before = [t.numpy().copy() for t in here]
        want, got = model(*here), run(*there)
        for g, w in zip([*got, *there], [*want, *here], strict=True):
            torch.testing.assert_close(g.cpu(), w)
    assert run.weights["calls"].item() == model.calls.item() == 2
    arrays = dict(zip("abc", before))
    made = in_jax_alone(tmp_path, arrays, "program(given['a'], given['b'], given['c'])")
    expected = [np.int64(1), here[0], here[2], *want]
    for array, value in zip(made.values(), expected, strict=True):
        np.testing.assert_allclose(array, np.asarray(value), rtol=1e-5, atol=1e-6)


def test_random_numbers_are_those_of_eager(tmp_path: Path) -> None:
    x = torch.randn(4, 6)
    saved(Dropped(), (x,), tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text())["draws"] == 3
    run, model = export.load(tmp_path), Dropped()
    results: list[list[torch.Tensor]] = []
    for f in (model, run):
        torch.manual_seed(5)
        # The state advances as in eager, for the next call and for other ops.
        y = x.to("tpu")
        results.append([f(y).cpu(), f(y).cpu(), torch.rand(3, device="tpu").cpu()])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    made = in_jax_alone(
        tmp_path,
        {"x": x.numpy()},
        "[program(given['x'], seed=5, offset=n)[0] for n in (0, 12)]",
    )
    for array, expected in zip(made.values(), results[0]):
        np.testing.assert_allclose(array, expected.numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="seed="):
        with_jax.load(tmp_path)(x.numpy())


def test_weights_inside_and_a_seed_compile_once(tmp_path: Path) -> None:
    export.save(torch.export.export(Dropped(), (torch.ones(7),)), tmp_path, weights="inside")
    run = export.load(tmp_path)
    x = torch.ones(7).to("tpu")
    first = run(x).cpu()
    with torch.tpu.no_recompile():
        assert not torch.equal(run(x).cpu(), first)


def test_dropout_of_attention(tmp_path: Path) -> None:
    x = torch.randn(1, 2, 64, 8)
    saved(Attention(), (x,), tmp_path)
    run = export.load(tmp_path)
    results = [run(x.to("tpu")).cpu() for _ in range(40)]
    assert not torch.equal(results[0], results[1])
    want = F.scaled_dot_product_attention(x, x, x)
    # Half of the weights at twice their size, on average the same.
    torch.testing.assert_close(torch.stack(results).mean(0), want, rtol=0.5, atol=0.6)
