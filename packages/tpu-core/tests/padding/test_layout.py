"""Which layouts are the same in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_core.padding.layout import Padded, Space, folded
from tpu_core.padding.sizes import Size, static

T = Size(1, (0,), 0)


@pytest.mark.parametrize(
    "dim, same",
    [
        ((static(6),), (static(6),)),
        ((static(2), static(3)), (static(6),)),
        ((static(1), T), (T,)),
        ((T, static(3)), (Size(3, (0,), 0),)),
        ((static(2), T, static(3), static(4)), (static(2), Size(12, (0,), 0))),
        ((T, T), (T, T)),
    ],
)
def test_static_factors_belong_to_what_comes_before(dim, same):
    assert folded(dim) == same
    space = Space([np.int32(5)], (8,))
    assert space.length(folded(dim)) == space.length(dim)
    assert space.count(folded(dim)) == space.count(dim)
    # Which elements count is found by walking over all indices, factor by factor.
    lengths = [space.padded(s) for s in dim]
    places = np.stack(np.unravel_index(np.arange(space.length(dim)), lengths))
    actual = np.array([int(space.actual(s)) for s in dim])
    assert space.valid(dim).tolist() == (places < actual[:, None]).all(0).tolist()


def test_other_names_for_the_same_memory_move_nothing():
    space = Space([np.int32(5)], (8,))
    x = jnp.arange(48.0).reshape(2, 24)

    def function(x: jax.Array) -> list[jax.Array]:
        value = Padded(x, ((static(2),), (T, static(3))))
        moved = space.relayout(value, ((static(1), static(2)), (Size(3, (0,), 0),)))
        return [moved.array, space.as_prefix(value, 1).array]

    assert jax.make_jaxpr(function)(x).eqns == []
    merged = Padded(x, ((static(2),), (static(3), T)))
    assert space.as_prefix(merged, 1).array[0].tolist()[:15] == [
        float(8 * i + j) for i in range(3) for j in range(5)
    ]


def test_one_selection_masks_all_dims():
    space = Space([np.int32(1)], (2,))
    x = Padded(jnp.ones((2, 2)), ((T,), (T,)))
    assert space.mask(x, (0, 1), -1).tolist() == [[1, -1], [-1, -1]]
    assert space.mask(x, (), -1) is x.array
