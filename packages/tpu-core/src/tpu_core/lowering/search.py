"""Lowerings of searchsorted and bucketize."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, is_float, result_type
from tpu_core.lowering.registry import lowering
from tpu_core.lowering.tables import are_inputs

# Up to this many boundaries a comparison with each of them fuses and beats a search whose steps
# are gathers.
COMPARE_ALL = 128
# Halvings that find a place among as many as int32 counts.
_MOST_STEPS = 31


def insertion_points(boundaries: jax.Array, values: jax.Array, right: bool) -> jax.Array:
    """Insertion points of ``values`` (..., m) in sorted ``boundaries`` (..., n), as int32.

    NaN is greater than every number (Bucketization.cpp, cus_lower_bound).
    """
    count = boundaries.shape[-1]

    def goes_after(bound: jax.Array) -> jax.Array:
        return ~((bound > values) if right else (bound >= values))

    if not count or not values.size:
        return jnp.zeros(values.shape, np.int32)
    varies = are_inputs()  # then the steps are as many for each size
    if count <= COMPARE_ALL and not varies:
        wide = lax.expand_dims(values, (values.ndim,))
        bounds = lax.expand_dims(boundaries, (boundaries.ndim - 1,))
        before = ~((bounds > wide) if right else (bounds >= wide))
        if is_float(boundaries.dtype):
            return _walk(before, 0, count)
        return jnp.sum(before, axis=-1, dtype=np.int32)

    def step(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, end = state
        middle = start + (end - start) // 2
        if boundaries.ndim == 1:
            bound = boundaries.at[middle].get(mode="clip")
        else:
            bound = jnp.take_along_axis(boundaries, middle, axis=-1, mode="clip")
        after = goes_after(bound) & (start < end)
        return jnp.where(after, middle + 1, start), jnp.where(after, end, middle)

    start = jnp.zeros(values.shape, np.int32)
    end = jnp.full(values.shape, count, np.int32)
    steps = _MOST_STEPS if varies else count.bit_length()
    return lax.fori_loop(0, steps, step, (start, end))[0]


def _walk(before: jax.Array, start: int, end: int) -> jax.Array:
    """The search from comparisons with all boundaries.

    NaN, after which each value goes, stands at the end of sorted boundaries. Where a search ends
    then depends on the boundaries that it meets, so it takes ATen's own path.
    """
    if start == end:
        return jnp.full(before.shape[:-1], start, np.int32)
    middle = start + (end - start) // 2
    after = before[..., middle]
    return jnp.where(after, _walk(before, middle + 1, end), _walk(before, start, middle))


@lowering("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def searchsorted(
    boundaries: jax.Array,
    values: jax.Array,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    if side is not None:
        right = side == "right"
    dtype = result_type(boundaries, values)
    boundaries, values = cast(boundaries, dtype), cast(values, dtype)
    if sorter is not None:
        boundaries = jnp.take_along_axis(boundaries, sorter.astype(np.int32), axis=-1, mode="clip")
    shape = values.shape
    if boundaries.ndim > 1 and not values.ndim:
        raise TypeError("searchsorted of a number needs a 1-D sorted sequence.")
    return lax.reshape(insertion_points(boundaries, jnp.atleast_1d(values), right), shape)


@lowering("aten.bucketize.Tensor", "aten.bucketize.Scalar")
def bucketize(
    values: jax.Array, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False
) -> jax.Array:
    return searchsorted(boundaries, values, right=right)
