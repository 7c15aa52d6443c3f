"""Pairwise distances (aten/src/ATen/native/Distance.cpp, cpu/DistanceOpsKernel.cpp)."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpu_core.array_types import Bool, Float, Int32
from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.matmul import contract
from tpu_core.lowering.registry import lowering

# Past this many rows ATen computes the Euclidean distance by a matrix product.
_MATRIX_ROWS = 25


def _norm(difference: Float[Array, "*shape size"], p: float) -> Float[Array, "*shape"]:
    """The p-norm over the last dim."""
    a = jnp.abs(difference)
    if p == 0:
        return jnp.sum(cast(a != 0, a.dtype), axis=-1)
    if p == 1:
        return jnp.sum(a, axis=-1)
    if p == 2:
        return jnp.sqrt(jnp.sum(a * a, axis=-1))
    if math.isinf(p):
        return jnp.max(a, axis=-1, initial=0)
    return jnp.sum(a ** jnp.asarray(p, a.dtype), axis=-1) ** jnp.asarray(1 / p, a.dtype)


def _norm_gradient(difference: Array, distance: Array, grad: Array, p: float) -> Any:
    """Gradient of `_norm` by ``difference``; ``distance`` and ``grad`` have a last dim of 1."""
    zero, one = jnp.zeros((), difference.dtype), jnp.ones((), difference.dtype)
    sign, a = jnp.sign(difference), jnp.abs(difference)
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return grad * sign
    apart = distance != 0
    safe = jnp.where(apart, distance, one)
    if p == 2:
        return jnp.where(apart, grad * difference / safe, zero)
    if math.isinf(p):
        return jnp.where(apart & (a == distance), grad * sign, zero)
    if p < 1:
        # |d|**(p-1) is infinite at d = 0, where ATen gives 0.
        ratio = jnp.where(a == 0, one, a) ** jnp.asarray(p - 1, a.dtype)
        slope = jnp.where(a == 0, zero, sign * ratio)
    else:
        slope = sign * a ** jnp.asarray(p - 1, a.dtype)
    return jnp.where(apart, grad * slope / safe ** jnp.asarray(p - 1, a.dtype), zero)


def _euclidean(
    x: Float[Array, "*batch rows size"], y: Float[Array, "*batch others size"]
) -> Float[Array, "*batch rows others"]:
    """``sqrt(|x|^2 + |y|^2 - 2 x.y)``."""
    rank = x.ndim
    batch = tuple(range(rank - 2))
    product = contract(x, y, (((rank - 1,), (rank - 1,)), (batch, batch)))
    square = jnp.sum(x * x, axis=-1)[..., :, None] + jnp.sum(y * y, axis=-1)[..., None, :]
    return jnp.sqrt(jnp.maximum(square - 2 * product, jnp.zeros((), x.dtype)))


def _broadcast(x: Array, y: Array) -> tuple[Array, Array]:
    batch = jnp.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return tuple(jnp.broadcast_to(v, (*batch, *v.shape[-2:])) for v in (x, y))  # type: ignore


@lowering("aten._cdist_forward.default", static=("p",))
def cdist(
    x: Float[Array, "*#batch rows size"],
    y: Float[Array, "*#batch others size"],
    p: float,
    compute_mode: int | None = None,
) -> Float[Array, "*batch rows others"]:
    """Mode 0 uses a matrix product for many rows, 1 always, 2 never."""
    x, y = _broadcast(cast(x, op_math(x.dtype)), cast(y, op_math(y.dtype)))
    many = x.shape[-2] > _MATRIX_ROWS or y.shape[-2] > _MATRIX_ROWS
    mode = compute_mode or 0
    if p == 2 and (mode == 1 or (mode == 0 and many)) and x.size and y.size:
        return _euclidean(x, y)
    return _norm(x[..., :, None, :] - y[..., None, :, :], p)


@lowering("aten._cdist_backward.default", static=("p",))
def cdist_backward(
    grad: Float[Array, "*batch rows others"],
    x: Float[Array, "*#batch rows size"],
    y: Float[Array, "*#batch others size"],
    p: float,
    distance: Float[Array, "*batch rows others"],
) -> Float[Array, "*batch rows size"]:
    """Gradient by ``x``; PyTorch broadcasts none that is empty."""
    if 0 in (*grad.shape, x.shape[-1]):
        return jnp.zeros_like(x)
    grad, distance, x, y = (cast(v, op_math(x.dtype)) for v in (grad, distance, x, y))
    x, y = _broadcast(x, y)
    difference = x[..., :, None, :] - y[..., None, :, :]
    return jnp.sum(_norm_gradient(difference, distance[..., None], grad[..., None], p), axis=-2)


def _packed(n: int) -> tuple[Int32[Array, "{n} {n}"], Bool[Array, "{n} {n}"]]:
    """Index of each pair of rows in the packed result, and whether it is there (``i < j``)."""
    i = lax.broadcasted_iota(np.int32, (n, n), 0)
    j = lax.broadcasted_iota(np.int32, (n, n), 1)
    return i * cast(n, np.int32) - lax.div(i * (i + 1), np.int32(2)) + j - i - 1, i < j


@lowering("aten._pdist_forward.default", static=("p",))
def pdist(x: Float[Array, "rows size"], p: float = 2) -> Float[Array, " rows*(rows-1)//2"]:
    """Distances of the rows ``i < j``, row after row."""
    x = cast(x, op_math(x.dtype))
    n = x.shape[0]
    count = n * (n - 1) // 2
    full = _norm(x[:, None, :] - x[None, :, :], p)
    position, above = _packed(n)
    position = jnp.where(above, position, cast(count, np.int32))
    return jnp.zeros((count,), x.dtype).at[position].set(full, mode="drop")


@lowering("aten._pdist_backward.default", static=("p",))
def pdist_backward(
    grad: Float[Array, " pairs"],
    x: Float[Array, "rows size"],
    p: float,
    distance: Float[Array, " pairs"],
) -> Float[Array, "rows size"]:
    n, dtype = x.shape[0], op_math(x.dtype)
    x, grad, distance = (cast(v, dtype) for v in (x, grad, distance))
    if n < 2:
        return jnp.zeros_like(x)
    position, above = _packed(n)

    def square(values: Array) -> Array:
        taken = jnp.take(values, jnp.where(above, position, np.int32(0)), mode="clip")
        upper = jnp.where(above, taken, jnp.zeros((), dtype))
        return (upper + upper.T)[..., None]

    difference = x[:, None, :] - x[None, :, :]
    return jnp.sum(_norm_gradient(difference, square(distance), square(grad), p), axis=1)
