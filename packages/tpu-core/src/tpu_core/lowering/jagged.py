"""Jagged tensors between packed rows and padded sequences.

Values are the rows of all sequences, one sequence after another; sequence ``i`` has the rows
``offsets[i]`` to ``offsets[i + 1]``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tpu_core.dtypes import cast
from tpu_core.lowering.checks import Finding, check, fixed, has_elements
from tpu_core.lowering.gather_scatter import gather_slices, to_index
from tpu_core.lowering.registry import lowering
from tpu_core.lowering.search import insertion_points

_PADDED_TO_JAGGED = "_padded_dense_to_jagged_forward(): "


@lowering("aten._jagged_to_padded_dense_forward.default")
def jagged_to_padded_dense(
    values: jax.Array,
    offsets: Sequence[jax.Array],
    max_lengths: Sequence[int],
    padding_value: float = 0.0,
) -> jax.Array:
    """(sequences, max length, ...): what is longer is cut, the rest is ``padding_value``."""
    (length,) = max_lengths
    rows = values.shape[0]
    bounds = to_index(offsets[0], rows)
    fill = cast(padding_value, values.dtype)
    shape = (bounds.shape[0] - 1, length)
    if not rows:
        return jnp.full(shape + values.shape[1:], fill)
    place = bounds[:-1, None] + jnp.arange(length, dtype=bounds.dtype)
    found = gather_slices(values, (0,), [place], 0)
    is_inside = (place < bounds[1:, None]).reshape(shape + (1,) * (values.ndim - 1))
    return jnp.where(is_inside, found, fill)


@lowering("aten._padded_dense_to_jagged_forward.default")
def padded_dense_to_jagged(
    dense: jax.Array, offsets: Sequence[jax.Array], total_L: int | None = None
) -> jax.Array:
    """The ``total_L`` rows that are no padding."""
    if total_L is None:
        raise TypeError("the number of rows depends on the offsets.")
    bounds = to_index(offsets[0], max(total_L, dense.shape[1]))
    row = jnp.arange(total_L, dtype=bounds.dtype)
    sequence = insertion_points(bounds[1:], row, right=True)
    start = gather_slices(bounds, (0,), [sequence], 0)
    return gather_slices(dense, (0, 1), [sequence, row - start], 0)


@check("aten._padded_dense_to_jagged_forward.default", applies=has_elements)
def lengths(
    dense: jax.Array, offsets: Sequence[jax.Array], total_L: int | None = None
) -> Iterator[Finding]:
    bounds, most = offsets[0], dense.shape[1]
    if total_L is not None:
        text = _PADDED_TO_JAGGED + "final offset should match total_L value"
        yield Finding(bounds[-1] != cast(total_L, bounds.dtype), 0, fixed(RuntimeError, text))
    longest = jnp.max(jnp.diff(bounds))
    error = functools.partial(_too_long, most)
    yield Finding(longest > cast(most, bounds.dtype), longest.astype(np.int64), error)


def _too_long(most: int, longest: int) -> Exception:
    return RuntimeError(
        f"{_PADDED_TO_JAGGED}found batch item of length {longest} when max length specified by "
        f"padded input is {most}"
    )
