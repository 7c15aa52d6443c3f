"""Constant, reflection and replication padding, and the gradients.

Padding along one axis copies slices, reversed slices or one element; the gradient is the transpose
of that, which JAX derives, so that neither uses a gather or a scatter. Negative padding crops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.registry import lowering
from tpu_core.lowering.weighted_gather import WeightedGather, apply


@lowering("aten.constant_pad_nd.default")
def constant_pad(x: jax.Array, pad: Sequence[int], value: Any = 0) -> jax.Array:
    """``pad`` holds pairs (before, after), the last dim first."""
    widths = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        widths[x.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(x, cast(value, x.dtype), widths)


def _reflect(size: int, before: int, after: int) -> WeightedGather:
    period = max(2 * (size - 1), 1)
    position = np.abs(np.arange(-before, size + after)) % period
    return WeightedGather.select(np.minimum(position, period - position) * (size > 1), size)


def _replicate(size: int, before: int, after: int) -> WeightedGather:
    return WeightedGather.select(np.clip(np.arange(-before, size + after), 0, size - 1), size)


def _pad(x: jax.Array, padding: Sequence[int], table: Callable[..., WeightedGather]) -> jax.Array:
    for i in range(len(padding) // 2):
        axis = x.ndim - 1 - i
        before, after = padding[2 * i], padding[2 * i + 1]
        if before or after:
            x = apply(x, axis, table(x.shape[axis], before, after))
    return x


def _register(name: str, rank: int, table: Callable[..., WeightedGather]) -> None:
    def forward(x: jax.Array, padding: Sequence[int]) -> jax.Array:
        return _pad(x, padding, table)

    def backward(grad: jax.Array, x: jax.Array, padding: Sequence[int]) -> jax.Array:
        grad = cast(grad, op_math(grad.dtype))
        like = jax.ShapeDtypeStruct(x.shape, grad.dtype)
        return jax.linear_transpose(lambda v: _pad(v, padding, table), like)(grad)[0]

    lowering(f"aten.{name}{rank}d.default")(forward)
    lowering(f"aten.{name}{rank}d_backward.default")(backward)


for _rank in (1, 2, 3):
    _register("reflection_pad", _rank, _reflect)
    _register("replication_pad", _rank, _replicate)
