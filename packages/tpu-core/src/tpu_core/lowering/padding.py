"""Constant, reflection and replication padding, and the gradients.

Padding along one axis copies slices, reversed slices or one element; the gradient is the transpose
of that, which JAX derives, so that neither uses a gather or a scatter. Negative padding crops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.registry import lowering
from tpu_core.lowering.tables import are_inputs
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


def _beside_reflected(x: jax.Array, axis: int, before: int, after: int) -> list[jax.Array]:
    size = x.shape[axis]
    ends = (1, before + 1), (size - 1 - after, size - 1)
    return [lax.rev(lax.slice_in_dim(x, *end, axis=axis), (axis,)) for end in ends]


def _beside_replicated(x: jax.Array, axis: int, before: int, after: int) -> list[jax.Array]:
    ends = lax.slice_in_dim(x, 0, 1, axis=axis), lax.slice_in_dim(x, -1, None, axis=axis)
    shapes = ((*x.shape[:axis], n, *x.shape[axis + 1 :]) for n in (before, after))
    return [jnp.broadcast_to(end, shape) for end, shape in zip(ends, shapes)]


@dataclass(frozen=True)
class _Mode:
    """Padding of one axis by elements of its own.

    Attributes:
        table: The map, from the axis' size and the lengths before and after it.
        beside: The padding before and after an axis, neither of which removes elements: the same
            ops for any lengths.
    """

    table: Callable[[int, int, int], WeightedGather]
    beside: Callable[[jax.Array, int, int, int], list[jax.Array]]

    def pad(self, x: jax.Array, padding: Sequence[int]) -> jax.Array:
        """``padding`` holds pairs (before, after), the last dim first."""
        for i in range(len(padding) // 2):
            axis = x.ndim - 1 - i
            before, after = padding[2 * i], padding[2 * i + 1]
            if are_inputs() and before >= 0 and after >= 0:
                first, last = self.beside(x, axis, before, after)
                x = lax.concatenate([first, x, last], axis)
            elif before or after:
                x = apply(x, axis, self.table(x.shape[axis], before, after))
        return x


def _register(name: str, rank: int, mode: _Mode) -> None:
    def forward(x: jax.Array, padding: Sequence[int]) -> jax.Array:
        return mode.pad(x, padding)

    def backward(grad: jax.Array, x: jax.Array, padding: Sequence[int]) -> jax.Array:
        grad = cast(grad, op_math(grad.dtype))
        like = jax.ShapeDtypeStruct(x.shape, grad.dtype)
        return jax.linear_transpose(lambda v: mode.pad(v, padding), like)(grad)[0]

    lowering(f"aten.{name}{rank}d.default")(forward)
    lowering(f"aten.{name}{rank}d_backward.default")(backward)


for _rank in (1, 2, 3):
    _register("reflection_pad", _rank, _Mode(_reflect, _beside_reflected))
    _register("replication_pad", _rank, _Mode(_replicate, _beside_replicated))
