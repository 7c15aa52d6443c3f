"""Biases of linear layers are added behind the view of the product, to the same bits."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from tpu_compile.aot import trace as tracing
from tpu_compile.fx_utils import lowering_of, outputs
from tpu_core import lowering, runtime
from tpu_core.lowering.evaluate import to_jax
from tpu_core.recorder.compute import GraphEvaluator

Tensor = torch.Tensor


@pytest.fixture(autouse=True, scope="module")
def started() -> None:
    runtime.runtime()
    lowering.load()


def traced(f: Any, inputs: list[Tensor]) -> GraphModule:
    mode = tracing.fake_mode()
    return tracing.trace(f, [tracing.fake_like(x, mode) for x in inputs], mode)


def targets(graph: GraphModule) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes]


def run(graph: GraphModule, inputs: list[Tensor]) -> list[np.ndarray]:
    with jax.enable_x64(True):
        found = GraphEvaluator.run(graph, [to_jax(x) for x in inputs], None, entry_of=lowering_of)
    return [np.asarray(x, np.float64) for x in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_bias_is_added_behind_the_view(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [torch.randn(s).to(dtype) for s in ((2, 3, 8), (6, 8), (6,))]
    f = lambda *xs: [F.linear(*xs)]  # noqa: E731
    late = traced(f, inputs)
    assert "aten.addmm.default" not in targets(late)
    monkeypatch.setattr(tracing, "add_late", lambda graph: None)
    early = traced(f, inputs)
    assert "aten.addmm.default" in targets(early)
    (got,), (want,) = run(late, inputs), run(early, inputs)
    np.testing.assert_array_equal(got, want)
    assert all(n.meta["val"].dtype == dtype for g in (early, late) for n in outputs(g))


@pytest.mark.parametrize("shape", [(3, 8), (1, 8)])
def test_other_products_keep_their_bias(shape: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(shape), torch.randn(8, 6), torch.randn(6)
    whole = traced(lambda *xs: [torch.addmm(*xs)], [bias, x, weight])
    split = traced(lambda *xs: [torch.addmm(*xs).view(-1, 2, 3)], [bias, x, weight])
    scaled = traced(lambda *xs: [torch.addmm(*xs, beta=2).view(1, -1, 6)], [bias, x, weight])
    assert all("aten.addmm.default" in targets(g) for g in (whole, split, scaled))
