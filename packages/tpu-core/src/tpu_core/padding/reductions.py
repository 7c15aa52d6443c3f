"""Rules of reductions, cumulative ops and sorts: padding takes part as what changes nothing."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from tpu_core.padding.interpret import PaddingContext, bind, rule, same_dims
from tpu_core.padding.layout import Padded, is_static, replaced


def lowest(dtype: Any) -> Any:
    """Least value of the dtype."""
    if dtype == np.bool_:
        return False
    return -np.inf if jnp.issubdtype(dtype, np.inexact) else jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """Greatest value of the dtype."""
    if dtype == np.bool_:
        return True
    return np.inf if jnp.issubdtype(dtype, np.inexact) else jnp.iinfo(dtype).max


_NEUTRAL: dict[str, Any] = {
    "sum": lambda _: 0,
    "prod": lambda _: 1,
    "max": lowest,
    "min": highest,
    "or": lambda dtype: False if dtype == np.bool_ else 0,
    "and": lambda dtype: True if dtype == np.bool_ else -1,
    "xor": lambda dtype: False if dtype == np.bool_ else 0,
    "logsumexp": lowest,
}


@rule(*(f"reduce_{kind}" for kind in ("sum", "prod", "max", "min", "or", "and", "xor")))
def reduce(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    (x,), axes = operands, eqns[0].params["axes"]
    neutral = _NEUTRAL[eqns[0].primitive.name.removeprefix("reduce_")](x.array.dtype)
    array = context.space.mask(x, axes, neutral)
    dims = tuple(d for i, d in enumerate(x.dims) if i not in axes)
    return [Padded(r, dims) for r in bind(eqns[0], [array])]


@rule("argmax", "argmin")
def argmax(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    (x,), (axis,) = operands, eqns[0].params["axes"]
    worst = lowest if eqns[0].primitive.name == "argmax" else highest
    array = context.space.mask(x, [axis], worst(x.array.dtype))
    (index,) = bind(eqns[0], [array])
    index = context.space.logical_index(x.dims[axis], index)
    return [Padded(index, (*x.dims[:axis], *x.dims[axis + 1 :]))]


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulate(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    axis = eqns[0].params["axis"]
    x = context.space.as_prefix(operands[0], axis)
    neutral = _NEUTRAL[eqns[0].primitive.name.removeprefix("cum")](x.array.dtype)
    array = context.space.mask(x, [axis], neutral)
    return [Padded(r, x.dims) for r in bind(eqns[0], [array])]


@rule("sort")
def sort(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    axis, keys = eqns[0].params["dimension"], eqns[0].params["num_keys"]
    xs = same_dims(context, [context.space.as_prefix(x, axis) for x in operands])
    arrays = [x.array for x in xs]
    if is_static(xs[0].dims[axis]):
        return [Padded(r, xs[0].dims) for r in bind(eqns[0], arrays)]
    # Padding is greater than everything, NaN included.
    padding = ~context.space.valid(xs[0].dims[axis])
    shape = [1] * arrays[0].ndim
    shape[axis] = -1
    first = jnp.broadcast_to(padding.reshape(shape), arrays[0].shape)
    results = lax.sort(
        [first, *arrays],
        dimension=axis,
        is_stable=eqns[0].params["is_stable"],
        num_keys=keys + 1,
    )
    return [Padded(r, xs[0].dims) for r in results[1:]]


@rule("top_k", handles=("k",))
def top_k(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    axis = eqns[0].params.get("axis", operands[0].array.ndim - 1) % operands[0].array.ndim
    x = context.space.as_prefix(operands[0], axis)
    size = context.out(eqns)[axis]
    # Of equal elements the first comes first, so padding comes after all that count.
    array = context.space.mask(x, [axis], lowest(x.array.dtype))
    dims = replaced(x.dims, axis, (size,))
    # The buckets of two sizes know nothing of each other.
    k = min(context.space.padded(size), array.shape[axis])
    shape = [*array.shape[:axis], context.space.padded(size), *array.shape[axis + 1 :]]
    results = bind(eqns[0], [array], k=k)
    return [Padded(context.space.resized(r, shape), dims) for r in results]
