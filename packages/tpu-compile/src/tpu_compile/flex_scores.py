"""The graphs of ``flex_attention``, evaluated for many scores at once by `jax.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from torch.fx import GraphModule

from tpu_core.extend import cast, register

if TYPE_CHECKING:
    from tpu_compile.control_flow import HigherOrderCall

Indices = Sequence[Any]
"""Positions in batch, heads, queries and keys: a vector each."""


@dataclass(frozen=True)
class ScoreGraphs:
    """Score and mask modifications of a call.

    Attributes:
        call: The call.
        score_mod: Graph of a score, its four indices and ``score_buffers``.
        mask_mod: Graph of four indices and ``mask_buffers``.
        score_buffers, mask_buffers: Tensors that they read beside.
        joint: Graph of ``score_mod``'s inputs, the score's gradient before the buffers; it returns
            their gradients.
    """

    call: HigherOrderCall
    score_mod: GraphModule
    mask_mod: GraphModule
    score_buffers: Sequence[Any]
    mask_buffers: Sequence[Any]
    joint: GraphModule | None = None

    def changed(self, raw: jax.Array, at: Indices) -> jax.Array:
        """Scores after ``score_mod``; the mask is not applied.

        Args:
            raw: Scores ``[B, H, M, N]`` in float32 or float64.
            at: Their indices.
        """

        def change(score: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
            return self.call.run(self.score_mod, (score, b, h, m, n, *self.score_buffers), None)[0]

        return cast(_of_each(change, at, raw), raw.dtype)

    def mask(self, at: Indices) -> jax.Array:
        """Mask of the scores that count, ``[B, H, M, N]``."""

        def is_attended(*index: Any) -> Any:
            return self.call.run(self.mask_mod, (*index, *self.mask_buffers), None)[0]

        mask: jax.Array = _of_each(is_attended, at)
        return mask

    def gradients(
        self, raw: jax.Array, at: Indices, grads: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
        """Gradients of ``raw`` and of the buffers from those of the changed scores."""
        joint = self.joint
        assert joint is not None

        def one(s: Any, b: Any, h: Any, m: Any, n: Any, g: Any) -> Any:
            grad, _, _, _, _, *captured = self.call.run(
                joint, (s, b, h, m, n, g, *self.score_buffers), None
            )
            return grad, tuple(None if c is None else _total(c) for c in captured)

        made: tuple[jax.Array, tuple[jax.Array | None, ...]]
        made = _of_each(one, at, raw, grads, out_axes=(0, None))
        return made


def _of_each(f: Callable[..., Any], at: Indices, *arrays: jax.Array, out_axes: Any = 0) -> Any:
    """A function of one element of each array and its indices, for all of them.

    Args:
        f: Called with the first array's element, four indices, and the others' elements.
        at: The indices.
        arrays: Of a shape that ``at`` has the lengths of.
        out_axes: As of `jax.vmap`.
    """
    count = len(arrays[:1])
    for dim in reversed(range(4)):
        indices = [0 if d == dim else None for d in range(4)]
        f = jax.vmap(f, (*[0] * count, *indices, *[0] * (len(arrays) - count)), out_axes)
    return f(*arrays[:1], *at, *arrays[1:])


def all_indices(shape: Sequence[int]) -> Indices:
    """Those of all scores of a shape ``[B, H, M, N]``."""
    return [np.arange(n, dtype=np.int32) for n in shape]


@custom_vmap
def _total(x: jax.Array) -> jax.Array:
    """One element's share of a gradient; the sum of all where it is mapped."""
    return x


@_total.def_vmap
def _total_of_many(_size: int, _mapped: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    return _total(x.sum(0)), False


def zeros_and_scatter(
    shape: Sequence[int], indices: Sequence[jax.Array], values: jax.Array
) -> jax.Array:
    """The gradient of a buffer that is read at some indices.

    Mapped over scores, it is one scatter of all their shares, not a buffer for each.
    """

    @custom_vmap
    def scatter(values: jax.Array, *indices: jax.Array) -> jax.Array:
        return jnp.zeros(tuple(shape), values.dtype).at[indices].add(values)

    @scatter.def_vmap
    def scatter_many(size: int, mapped: Any, *operands: jax.Array) -> tuple[jax.Array, bool]:
        expanded = (
            x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_mapped in zip(operands, mapped)
        )
        return scatter(*expanded), False

    result: jax.Array = scatter(values, *indices)
    return result


register("flex_lib.zeros_and_scatter.default", zeros_and_scatter)
