"""Values that the user's JAX code holds are never given to another program."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import tpu_core
from tpu_core import modes
from tpu_core.errors import DonatedBufferError


@pytest.mark.parametrize("mode", modes.names())
def test_an_array_from_to_jax_outlives_in_place_ops(mode):
    with torch.tpu.set_eager_mode(mode):
        x = torch.arange(4.0, device="tpu")
        array = tpu_core.to_jax(x)
        for _ in range(3):
            x.mul_(2)
        assert x.tolist() == [0.0, 8.0, 16.0, 24.0]
        del x
        torch.ones(4, device="tpu").add_(1).tolist()
        assert np.asarray(array).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("mode", modes.names())
def test_an_array_given_to_from_jax_outlives_in_place_ops(mode):
    with torch.tpu.set_eager_mode(mode):
        array = jax.numpy.arange(4.0)
        x = tpu_core.from_jax(array)
        x.add_(1)
        assert x.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert np.asarray(array).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_an_array_that_the_user_donates_says_so_at_the_next_read():
    x = torch.arange(4.0, device="tpu")
    array = tpu_core.to_jax(x)
    jax.jit(lambda a: a + 1, donate_argnums=0)(array).block_until_ready()
    assert array.is_deleted()
    with pytest.raises(DonatedBufferError, match="TPU1012"):
        (x + 1).tolist()
    with pytest.raises(DonatedBufferError, match="TPU1012"):
        x.tolist()
