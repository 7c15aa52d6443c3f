"""Gather and scatter primitives that the indexing lowerings share, under PyTorch's rules.

XLA cannot raise, so an index that PyTorch rejects is clamped when reading and its write dropped.
Indices are used as int32 wherever the dimension allows it (64-bit integers are pairs on a TPU), so
one that does not fit in 32 bits reads or writes an arbitrary valid element instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, op_math

_CLIP = lax.GatherScatterMode.CLIP
_DROP = lax.GatherScatterMode.FILL_OR_DROP
_SCATTERS = {
    "set": lax.scatter,
    "add": lax.scatter_add,
    "mul": lax.scatter_mul,
    "amax": lax.scatter_max,
    "amin": lax.scatter_min,
}
_POINTWISE = {
    "set": lambda x, u: u,
    "add": jnp.add,
    "mul": jnp.multiply,
    "amax": jnp.maximum,
    "amin": jnp.minimum,
}


def axis(dim: int, ndim: int) -> int:
    """A dimension counted from the front; a 0-d tensor has dimension 0."""
    return dim % max(ndim, 1)


def at_least_1d(x: jax.Array) -> jax.Array:
    """A 0-d tensor as one of a single element, which is how ATen's index ops treat it."""
    return x.reshape(1) if x.ndim == 0 else x


def to_index(index: jax.Array, size: int, wrap: bool = False) -> jax.Array:
    """An index tensor in the dtype to index ``size`` elements with.

    With ``wrap`` a negative index counts from the end; only indexing, ``take`` and the like do.
    """
    index = lax.convert_element_type(index, np.int32 if size < 2**31 else np.int64)
    if wrap:
        index = jnp.where(index < 0, index + cast(size, index.dtype), index)
    return index


def clamp_index(index: jax.Array, size: int) -> jax.Array:
    """An index that wraps, clamped to the valid range."""
    low, high = cast(-size, index.dtype), cast(max(size - 1, 0), index.dtype)
    return jnp.clip(index, low, high)


def _stack_index(index: Sequence[jax.Array]) -> jax.Array:
    if len(index) == 1:
        return index[0][..., None]
    dtype = np.result_type(*(i.dtype for i in index))
    return jnp.stack(jnp.broadcast_arrays(*(i.astype(dtype) for i in index)), axis=-1)


def gather_slices(
    x: jax.Array, dims: Sequence[int], index: Sequence[jax.Array], position: int
) -> jax.Array:
    """``x`` indexed by integer tensors in ``dims``; the broadcast index's dims go to ``position``.

    Args:
        x: The array to read.
        dims: Dimensions indexed, ascending.
        index: One tensor a dimension, from `to_index`.
        position: Position of the index's dimensions in the result.
    """
    start = _stack_index(index)
    batch = start.ndim - 1
    rest = [d for d in range(x.ndim) if d not in dims]
    shape = [x.shape[d] for d in rest]
    shape[position:position] = start.shape[:-1]
    if 0 in shape or any(x.shape[d] == 0 for d in dims):
        return jnp.zeros(shape, x.dtype)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(d for d in range(len(shape)) if not position <= d < position + batch),
        collapsed_slice_dims=tuple(dims),
        start_index_map=tuple(dims),
    )
    sizes = tuple(1 if d in dims else n for d, n in enumerate(x.shape))
    return lax.gather(x, start, numbers, sizes, mode=_CLIP)


def scatter_slices(
    x: jax.Array,
    dims: Sequence[int],
    index: Sequence[jax.Array],
    updates: jax.Array,
    position: int,
    kind: str,
) -> jax.Array:
    """Write ``updates``, shaped as `gather_slices` returns, or combine them into ``x``.

    ``kind`` is ``"set"``, ``"add"``, ``"mul"``, ``"amax"`` or ``"amin"``.
    """
    start = _stack_index(index)
    batch = start.ndim - 1
    if updates.size == 0 or x.size == 0:
        return x
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(
            d for d in range(updates.ndim) if not position <= d < position + batch
        ),
        inserted_window_dims=tuple(dims),
        scatter_dims_to_operand_dims=tuple(dims),
    )
    return _scatter(x, start, updates, numbers, kind)


def _scatter(x: jax.Array, start: jax.Array, updates: jax.Array, numbers: Any, kind: str) -> Any:
    dtype, wide = x.dtype, np.dtype(x.dtype)
    if kind in ("add", "mul"):
        wide = op_math(dtype)
    if wide == np.bool_ and kind != "set":  # no boolean combiner in JAX: or and and as max and min
        kind = {"add": "amax", "mul": "amin"}.get(kind, kind)
        wide = np.dtype(np.uint8)
    result = _SCATTERS[kind](cast(x, wide), start, cast(updates, wide), numbers, mode=_DROP)
    return cast(result, dtype)


def combine(x: jax.Array, updates: jax.Array, kind: str) -> jax.Array:
    """The elementwise form of a scatter's combination, in the dtype of ``x``."""
    if x.dtype == np.bool_:
        kind = {"add": "amax", "mul": "amin"}.get(kind, kind)
    return cast(_POINTWISE[kind](x, updates), x.dtype)


def gather_elements(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    """``torch.gather``: ``index`` has the rank of ``x`` and may be shorter in any dimension."""
    shape = index.shape
    x, index = at_least_1d(x), at_least_1d(index)
    dim = axis(dim, x.ndim)
    if index.size == 0 or x.shape[dim] == 0:
        return jnp.zeros(shape, x.dtype)
    others = tuple(d for d in range(x.ndim) if d != dim)
    x = lax.slice(
        x, (0,) * x.ndim, [n if d == dim else index.shape[d] for d, n in enumerate(x.shape)]
    )
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        operand_batching_dims=others,
        start_indices_batching_dims=others,
    )
    start = to_index(index, x.shape[dim])[..., None]
    return lax.gather(x, start, numbers, (1,) * x.ndim, mode=_CLIP).reshape(shape)


def scatter_elements(
    x: jax.Array, dim: int, index: jax.Array, updates: jax.Array, kind: str
) -> jax.Array:
    """``torch.scatter`` and its reductions; ``updates`` has at least the shape of ``index``."""
    shape = x.shape
    x, index, updates = at_least_1d(x), at_least_1d(index), at_least_1d(updates)
    dim = axis(dim, x.ndim)
    if index.size == 0 or x.size == 0:
        return x.reshape(shape)
    updates = cast(lax.slice(updates, (0,) * x.ndim, index.shape), x.dtype)
    region = tuple(n if d == dim else index.shape[d] for d, n in enumerate(x.shape))
    part = lax.slice(x, (0,) * x.ndim, region)
    start = to_index(index, x.shape[dim])
    if index.shape[dim] == 1:
        # No duplicates: a comparison, which fuses, does what would be a serial loop on the CPU.
        hit = lax.broadcasted_iota(start.dtype, region, dim) == start
        part = jnp.where(hit, combine(part, updates, kind), part)
    else:
        others = tuple(d for d in range(x.ndim) if d != dim)
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=(),
            inserted_window_dims=(dim,),
            scatter_dims_to_operand_dims=(dim,),
            operand_batching_dims=others,
            scatter_indices_batching_dims=others,
        )
        part = _scatter(part, start[..., None], updates, numbers, kind)
    if region != x.shape:
        part = lax.dynamic_update_slice(x, part, [np.int32(0)] * x.ndim)
    return part.reshape(shape)


def reduction_identity(dtype: Any, kind: str) -> Any:
    """The value that leaves a scatter's combination unchanged."""
    dtype = np.dtype(dtype)
    if kind in ("add", "mul"):
        return np.array(kind == "mul", dtype)
    if dtype == np.bool_:
        return np.array(kind == "amin", dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return np.array(info.max if kind == "amin" else info.min, dtype)
    return np.array(math.inf if kind == "amin" else -math.inf, dtype)
