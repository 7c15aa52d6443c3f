"""Lowerings of cumulative ops: sum, product, log-sum-exp, maximum and minimum.

JAX lowers its cumulative primitives to a logarithmic number of slices on the CPU and to
``reduce_window`` on TPUs, which XLA splits into blocks there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, op_math, to_numpy_dtype
from tpu_core.lowering.pointwise import log_add_exp
from tpu_core.lowering.registry import register_table


def _cumulative(
    x: jax.Array,
    dim: int,
    *,
    dtype: Any = None,
    out: Any,
    scan: Callable[..., jax.Array],
) -> jax.Array:
    dtype = to_numpy_dtype(dtype) if dtype is not None else out[0].dtype
    x = cast(cast(x, dtype), op_math(dtype))
    return scan(x, axis=dim % x.ndim) if x.ndim and x.size else x


def _log_step(total: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = log_add_exp(x, total)
    return total, total


def logcumsumexp(x: jax.Array, dim: int) -> jax.Array:
    x = cast(x, op_math(x.dtype))
    if not x.ndim or not x.size:
        return x
    axis = dim % x.ndim
    if np.dtype(x.dtype).kind == "c":
        # In order, as on the CPU: the turns that the imaginary part counts depend on it.
        _, sums = lax.scan(
            _log_step, jnp.full_like(x.take(0, axis), -jnp.inf), jnp.moveaxis(x, axis, 0)
        )
        return jnp.moveaxis(sums, 0, axis)
    return lax.cumlogsumexp(x, axis=axis)


def _cumulative_extremum(
    x: jax.Array, dim: int, *, scan: Callable[..., jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Running extremum and the latest index that attains it (ReduceOps.cpp, cummax_helper).

    An element attains it where it equals it or is NaN (which stays from there on), so that a
    running maximum over the indices of such elements gives the index.
    """
    if not x.ndim or not x.size:
        return x, jnp.zeros(x.shape, np.int64)
    axis = dim % x.ndim
    # Truth values have no extremum on all platforms; as bytes they do.
    keys = x.astype(np.uint8) if x.dtype == np.bool_ else x
    values = scan(keys, axis=axis)
    attains = (keys == values) | (keys != keys)
    position = lax.broadcasted_iota(np.int32, x.shape, axis)
    index = lax.cummax(jnp.where(attains, position, np.int32(0)), axis=axis)
    return values, index


register_table(
    {
        "aten.cumsum.default": partial(_cumulative, scan=lax.cumsum),
        "aten.cumprod.default": partial(_cumulative, scan=lax.cumprod),
        "aten.logcumsumexp.default": logcumsumexp,
        "aten._logcumsumexp.default": logcumsumexp,
        "aten.cummax.default": partial(_cumulative_extremum, scan=lax.cummax),
        "aten.cummin.default": partial(_cumulative_extremum, scan=lax.cummin),
    }
)
