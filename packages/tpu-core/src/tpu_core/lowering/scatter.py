"""Writes by index along one dimension: ``scatter`` and ``index_add`` and their relatives.

An index that PyTorch rejects is dropped (`gather_scatter`). Duplicates combine in index order.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tpu_core.dtypes import cast, is_float, op_math
from tpu_core.lowering.gather_scatter import (
    at_least_1d,
    axis,
    reduction_identity,
    scatter_elements,
    scatter_slices,
    to_index,
)
from tpu_core.lowering.registry import lowering

_KINDS = {
    "sum": "add",
    "add": "add",
    "mean": "add",
    "prod": "mul",
    "multiply": "mul",
    "amax": "amax",
    "amin": "amin",
}
Scatter = Callable[[jax.Array, jax.Array, str], jax.Array]


@lowering("aten.scatter.src")
def scatter(x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    return scatter_elements(x, dim, index, src, "set")


@lowering("aten.scatter.value")
def scatter_value(x: jax.Array, dim: int, index: jax.Array, value: jax.Array | float) -> jax.Array:
    return scatter_elements(
        x, dim, index, jnp.broadcast_to(cast(value, x.dtype), index.shape), "set"
    )


@lowering("aten.scatter.reduce")
def scatter_with_reduce(
    x: jax.Array, dim: int, index: jax.Array, src: jax.Array, reduce: str
) -> jax.Array:
    return scatter_elements(x, dim, index, src, _KINDS[reduce])


@lowering("aten.scatter.value_reduce")
def scatter_value_reduce(
    x: jax.Array, dim: int, index: jax.Array, value: jax.Array | float, reduce: str
) -> jax.Array:
    src = jnp.broadcast_to(cast(value, x.dtype), index.shape)
    return scatter_elements(x, dim, index, src, _KINDS[reduce])


@lowering("aten.scatter_add.default")
def scatter_add(x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    return scatter_elements(x, dim, index, src, "add")


@lowering("aten.scatter_reduce.two")
def scatter_reduce(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    src: jax.Array,
    reduce: str,
    include_self: bool = True,
) -> jax.Array:
    def apply(base: jax.Array, updates: jax.Array, kind: str) -> jax.Array:
        return scatter_elements(base, dim, index, updates, kind)

    return _reduce(x, src, reduce, include_self, apply)


def _reduce(
    x: jax.Array, src: jax.Array, reduce: str, include_self: bool, apply: Scatter
) -> jax.Array:
    """Reduce ``src`` into ``x``; without ``include_self`` written elements start from nothing.

    ``apply`` scatters updates of the shape of ``src`` into a base of the shape of ``x``.
    """
    kind, dtype = _KINDS[reduce], x.dtype
    wide = op_math(dtype) if kind in ("add", "mul") else dtype
    base, src = cast(x, wide), cast(src, wide)
    if not include_self:
        ones = jnp.ones(src.shape, np.bool_)
        written = apply(jnp.zeros(x.shape, np.bool_), ones, "set")
        base = jnp.where(written, reduction_identity(wide, kind), base)
    result = apply(base, src, kind)
    if reduce == "mean":
        start = jnp.ones if include_self else jnp.zeros
        count = apply(start(x.shape, np.int32), jnp.ones(src.shape, np.int32), "add")
        count = cast(jnp.maximum(count, np.int32(1)), wide)
        if is_float(wide) or np.dtype(wide).kind == "c":
            result = result / count
        else:
            result = jnp.floor_divide(result, count)
    return cast(result, dtype)


def _scatter_along(
    x: jax.Array, dim: int, index: jax.Array, source: jax.Array, kind: str
) -> jax.Array:
    """Combine the slices of ``source`` along ``dim`` into those of ``x`` that ``index`` names."""
    shape = x.shape
    x, index = at_least_1d(x), at_least_1d(index)
    dim = axis(dim, x.ndim)
    source = cast(source, x.dtype).reshape(x.shape[:dim] + index.shape + x.shape[dim + 1 :])
    start = to_index(index, x.shape[dim])
    return scatter_slices(x, (dim,), [start], source, dim, kind).reshape(shape)


@lowering("aten.index_add.default")
def index_add(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    source: jax.Array,
    alpha: jax.Array | float = 1,
) -> jax.Array:
    if x.dtype != np.bool_:
        wide = op_math(x.dtype)
        source = cast(source, wide) * cast(alpha, wide)
        return cast(_scatter_along(cast(x, wide), dim, index, source, "add"), x.dtype)
    source = source & cast(alpha, np.bool_)
    return _scatter_along(x, dim, index, source, "add")


@lowering("aten.index_copy.default")
def index_copy(x: jax.Array, dim: int, index: jax.Array, source: jax.Array) -> jax.Array:
    return _scatter_along(x, dim, index, source, "set")


@lowering("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def index_fill(x: jax.Array, dim: int, index: jax.Array, value: jax.Array | float) -> jax.Array:
    """Negative indices wrap. Only a 1-d mask is scattered; the fill itself is elementwise."""
    shape = x.shape
    x, index = at_least_1d(x), at_least_1d(index)
    dim = axis(dim, x.ndim)
    size = x.shape[dim]
    start = to_index(index, size, wrap=True)
    mask = scatter_slices(
        jnp.zeros(size, np.bool_), (0,), [start], jnp.ones(start.shape, np.bool_), 0, "set"
    )
    mask = mask.reshape([size if d == dim else 1 for d in range(x.ndim)])
    return jnp.where(mask, cast(value, x.dtype), x).reshape(shape)


@lowering("aten.index_reduce.default")
def index_reduce(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    source: jax.Array,
    reduce: str,
    include_self: bool = True,
) -> jax.Array:
    def apply(base: jax.Array, updates: jax.Array, kind: str) -> jax.Array:
        return _scatter_along(base, dim, index, updates, kind)

    return _reduce(x, source, reduce, include_self, apply)
