"""Comparison of a padded program's first run: rounding passes, no other number does."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tpu_core.padding import check


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
