"""The first run of a padded program beside an exact one: rounding passes, no other number does."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.extend.core import JaxprEqn

from tpu_core import modes
from tpu_core.metrics import METRICS
from tpu_core.padding import check
from tpu_core.padding.interpret import RULES, PaddingContext, bind
from tpu_core.padding.layout import Padded


@pytest.fixture(autouse=True)
def fused():
    with modes.using("fused"):
        yield


def _sum_with_padding(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    (x,), axes = operands, eqns[0].params["axes"]
    dims = tuple(d for axis, d in enumerate(x.dims) if axis not in axes)
    return [Padded(r, dims) for r in bind(eqns[0], [x.array])]


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


def test_what_a_result_spreads_over_is_allowed():
    noise, other = np.array([1e-8, -2e-8], np.float32), np.array([-3e-8, 1e-8], np.float32)
    assert not check._close(noise, other)
    assert check._close(noise, other, check._spread(noise, other))
    assert not check._close(noise, np.float32([1e-8, 1.0]), check._spread(noise, other))


def test_a_recording_whose_derived_size_is_beyond_its_array_is_left_out():
    """Of ``2 * n + 1`` an array between programs has room for ``2 * bucket`` elements."""
    family = SimpleNamespace(bound=lambda slot, buckets: (buckets[0] * (1 + slot),))
    for n, fits in ((8, False), (7, True), (9, False)):
        slots = [SimpleNamespace(shape=(n,)), SimpleNamespace(shape=(2 * n + 1,))]
        segment = SimpleNamespace(inputs=lambda: [0], live=[1], slots=slots)
        assert check._fits(family, segment, [n], (8,)) == fits


@pytest.mark.parametrize("other", [np.nan, np.inf, -np.inf])
def test_a_run_that_is_not_finite_allows_nothing(other):
    want = np.array([1.0, 2.0], np.float32)
    assert check._spread(want, np.array([other, 2.0], np.float32)) == 0.0


def test_integers_and_masks_of_an_input_stay():
    x = np.array([0.0, 1.0, -3.0, 0.3], np.float32)
    moved = check._off(x, np.random.default_rng(0))
    assert (moved[:3] == x[:3]).all()
    assert 0 < abs(moved[3] - x[3]) < 1e-5
