"""The first run of a padded program beside an exact one: rounding passes, no other number does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from jax.extend.core import JaxprEqn

from tpu_core import modes
from tpu_core.metrics import METRICS
from tpu_core.padding.interpret import RULES, PaddingContext, bind
from tpu_core.padding.layout import Padded


def _sum_with_padding(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    (x,), axes = operands, eqns[0].params["axes"]
    dims = tuple(d for axis, d in enumerate(x.dims) if axis not in axes)
    return [Padded(r, dims) for r in bind(eqns[0], [x.array])]


@pytest.fixture(autouse=True)
def fused():
    with modes.using("fused"):
        yield


def test_a_rule_that_forgets_padding_is_found_where_the_result_is_rounding(monkeypatch):
    """The gradient of a bias before a batch norm, whose own statistics are sums as well."""
    monkeypatch.setitem(RULES, "reduce_sum", _sum_with_padding)
    reasons = []
    for n in (5, 7, 6, 12, 9):
        seen = len(METRICS.compile_events())
        gradients = []
        x = torch.randn(n, 3)
        for device in ("cpu", "tpu"):
            bias = torch.full((3,), 0.7, device=device, requires_grad=True)
            y = F.batch_norm(x.to(device) * 1.5 + bias, None, None, training=True)
            (y**3 + y.sigmoid()).sum().backward()
            gradients.append(bias.grad.cpu())
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-4)
        reasons += [event.reason for event in METRICS.compile_events()[seen:]]
    assert any("came out otherwise on padded arrays" in reason for reason in reasons)
