"""Values of the kernel of ragged paged attention, by Pallas' interpreter.

The interpreter of jax 0.10.2 knows all of the kernel but one thing, a masked store through a plain
index (`TypedInt` has no shape); the other one, of `InterpretParams`, no load through a reshaped
reference. Here a masked store is a load, a choice and a store, which is what it means.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.pallas import tpu as pltpu

from ragged_reference import expected
from tpu_core.lowering.implementations import Target
from tpu_kernels.ops.ragged_paged_attention.pallas import ragged_paged_attention as kernel

SIZE, PAGE, PLACES = 128, 8, 3
# Keys of each sequence, and how many are new: a prompt of several blocks of queries, single tokens
# at the end and at the start of a page, a part of a prompt, one alone.
LENGTHS, NEW = [19, 24, 17, 11, 1], [19, 1, 1, 6, 1]


def masked_store(ref: Any, value: Any, *, mask: Any) -> None:
    ref[...] = jnp.where(mask, value, ref[...])


def call(heads: int, key_heads: int) -> list[torch.Tensor]:
    """Arguments with three tokens of no sequence at the end, and pages of none."""
    query = torch.randn(sum(NEW) + 3, heads, SIZE).bfloat16()
    pages = torch.randn(2 * len(NEW) * PLACES, PAGE, 2 * key_heads, SIZE).bfloat16()
    order = torch.randperm(len(pages))[: len(NEW) * PLACES].view(-1, PLACES)
    starts = torch.tensor([0, *NEW]).cumsum(0)
    return [query, pages, torch.tensor(LENGTHS), order, starts]


@pytest.mark.parametrize(
    ("heads", "key_heads", "count", "softcap", "window"),
    [
        pytest.param(4, 1, 5, 0.0, 0, id="Llama and Mixtral, of each key four queries"),
        pytest.param(4, 2, 5, 5.0, 9, id="Gemma, with a cap and a window"),
        pytest.param(8, 1, 3, 0.0, 0, id="one key for all, sequences that are none"),
    ],
)
def test_values(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    key_heads: int,
    count: int,
    softcap: float,
    window: int,
) -> None:
    monkeypatch.setattr(pltpu, "store", masked_store)
    arguments = call(heads, key_heads)
    arrays = [
        jnp.asarray(x.float().numpy(), jnp.bfloat16)
        if x.is_floating_point()
        else jnp.asarray(x.numpy().astype(np.int32))
        for x in arguments
    ]
    scale = 0.1
    with Target("cpu", kind="TPU v5e").applied():
        got = jax.jit(lambda q, p, n, i, s, c: kernel(q, p, n, i, s, c, scale, softcap, window))(
            *arrays, jnp.asarray([count], jnp.int32)
        )
    wanted = expected(arguments, count, scale, softcap, window)
    # Shares of keys, and results, are rounded to bfloat16.
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=2e-2, rtol=2e-2)
