"""Names of instructions: those of JAX and those of XLA's passes are told apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax

from tpu_core.pjrt import client as pjrt


def _update(a, index, m, starts):
    r = a.reshape(4, 4, 2)
    column = r[:, :, 1].at[index].add(1.0).reshape(4, 4, 1)
    a = lax.dynamic_update_slice(r, column, [jnp.int32(n) for n in (0, 0, 1)]).reshape(32)
    for k in range(4):
        seven = jnp.full((4, 1), 7, jnp.float32)
        m = lax.dynamic_update_slice(m, seven, (jnp.int32(0), starts[k]))
    return a, m


@pytest.mark.of_cpu(reason="the fault is XLA:CPU's, and other modules are left as they are")
def test_names_have_dashes():
    arrays = np.zeros(32, np.float32), np.array([0]), np.zeros((4, 4), np.float32), np.arange(4)
    text = jax.jit(_update).lower(*arrays)
    pjrt.module_bytes(text)
    shown = text.as_text(debug_info=True)
    assert "/dynamic-update-slice" in shown
    assert "/dynamic_update_slice" not in shown


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("writes", range(6))
def test_an_update_by_index_stays_beside_other_writes(size, writes):
    found = []
    for device in ("cpu", "tpu"):
        x = torch.zeros(2 * size * size).to(device).as_strided((size, size), (2 * size, 2), 1)
        y = torch.zeros(size, size).to(device)
        index, one = torch.tensor([0]).to(device), torch.ones((), device=device)
        x.index_put_((index,), one, accumulate=True)
        for k in range(writes):
            y[:, k % size].fill_(k)
        found.append((x.tolist(), y.tolist()))
    assert found[1] == found[0]
