"""The value of a storage whose array has padding."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tpu_core.pjrt.padded_array import PaddedArray


def test_is_where_its_array_is() -> None:
    array = jnp.arange(8.0)
    padded = PaddedArray(array, (5,))
    assert padded.devices() == array.devices()
    assert padded.is_ready() and not padded.is_deleted()
    assert np.array_equal(padded.window(), [0, 1, 2, 3, 4])
