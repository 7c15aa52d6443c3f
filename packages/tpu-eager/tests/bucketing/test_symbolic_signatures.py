"""Signatures from symbolic traces: those of a trace at each size, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tpu_core import modes
from tpu_core.lowering.registry import REGISTRY
from tpu_core.metrics import METRICS
from tpu_core.recorder import compute


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    with modes.using("fused"):
        yield


def test_of_layers_with_two_sizes_and_merged_dims(signatures: Counter[bool]) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    twin = torch.nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True).to("tpu")
    twin.load_state_dict(layer.state_dict())
    for n, length in ((3, 5), (4, 9), (6, 7), (5, 11), (7, 7), (9, 3)):
        x = torch.randn(n, length, 16)
        losses = []
        for model, given in ((layer, x), (twin, x.to("tpu"))):
            model.zero_grad()
            loss = torch.cat([model(given), given], 1).flatten(0, 1).logsumexp(0).square().mean()
            loss.backward()
            losses += [loss.detach().cpu(), model.linear1.weight.grad.cpu()]
        torch.testing.assert_close(losses[2:], losses[:2], rtol=1e-4, atol=1e-5)
    assert signatures[False] > 9 * signatures[True]


# Each with an op of its own, as programs stay.
SPECIAL = {
    "n == 12": torch.sin,
    "n > 40": torch.erf,
    "n % 4 == 0": torch.expm1,
    "n - 6 in (7, 9)": torch.sinh,
}


@pytest.mark.parametrize("special", SPECIAL)
def test_a_lowering_that_asks_for_the_size(special: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = SPECIAL[special]
    patched = REGISTRY.get(f"aten.{function.__name__}.default")
    call = compute.call_lowering

    def asking(entry: Any, args: Any, *rest: Any) -> Any:
        (found, *others) = call(entry, args, *rest)
        if entry is patched and eval(special, {"n": args[0].shape[0]}):
            found = found + 1
        return (found, *others)

    monkeypatch.setattr(compute, "call_lowering", asking)
    before = METRICS.snapshot()
    for n in (5, 7, 10, 9, 12, 13, 11, 15, 16, 41, 14, 64, 18):
        x = torch.randn(n, 17)
        expected = 2 * function(x) + (2 if eval(special, {"n": n}) else 0)
        torch.testing.assert_close((function(x.to("tpu")) * 2).cpu(), expected, msg=f"at {n}")
    assert METRICS.delta(before)["padded_executions"] > 3


def test_layers_that_repeat_are_traced_once() -> None:
    traces = []
    for depth in (2, 6):
        # Of a width of its own, as traces at a size are kept.
        layers = [torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.Softplus())] * depth
        model = torch.nn.Sequential(*layers).to("tpu")
        for n in (5, 9, 6):
            before = METRICS.snapshot()
            model(torch.randn(n, 7).to("tpu")).sum().item()
        traces.append(METRICS.delta(before)["outlines"])
    assert 0 < traces[1] <= traces[0]
