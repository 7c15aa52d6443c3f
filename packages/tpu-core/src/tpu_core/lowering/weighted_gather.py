"""Linear maps along one axis: each output is a weighted sum of few, statically known, inputs.

Resampling, adaptive pooling and padding are such maps along each spatial axis in turn, and their
gradients are the maps' transposes, so that no gradient needs a scatter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_core.lowering.tables import table

# Up to this many terms are added one by one, which fuses; more are gathered and reduced.
_UNROLL = 8
# An index that is at most this many runs of equal steps is slices, not a gather.
_RUNS = 4
# Pairs of an input and an output up to which a gradient goes through all of them.
DENSE = 4096


@dataclass(frozen=True)
class WeightedGather:
    """``y[i] = sum_j weight[i, j] * x[index[i, j]]``.

    Attributes:
        index: ``[outputs, terms]`` positions in the input.
        weight: ``[outputs, terms]``; exactly 0 marks a term that does not exist.
        size: Length of the input's axis.
        alike: Whether maps of other sizes are to be the same ops with other tables, so that padded
            arrays serve them; else an index that is few slices becomes slices.
    """

    index: np.ndarray[Any, Any]
    weight: np.ndarray[Any, Any]
    size: int
    alike: bool = False

    @staticmethod
    def select(index: Any, size: int) -> WeightedGather:
        """The map ``y[i] = x[index[i]]``."""
        index = np.asarray(index, np.int64).reshape(-1, 1)
        return WeightedGather(index, np.ones(index.shape), size)

    def transpose(self) -> WeightedGather:
        """The map of the gradient, from outputs back to inputs."""
        terms: list[dict[int, float]] = [{} for _ in range(self.size)]
        for i, (sources, weights) in enumerate(zip(self.index.tolist(), self.weight.tolist())):
            for j, w in zip(sources, weights):
                if w != 0:
                    terms[j][i] = terms[j].get(i, 0.0) + w
        width = max((len(t) for t in terms), default=0)
        index = np.zeros((self.size, width), np.int64)
        weight = np.zeros((self.size, width))
        for j, t in enumerate(terms):
            index[j, : len(t)] = list(t.keys())
            weight[j, : len(t)] = list(t.values())
        return WeightedGather(index, weight, len(self.index))


def apply(x: jax.Array, axis: int, m: WeightedGather) -> jax.Array:
    """Apply a map along one axis, in ``x``'s dtype. Missing terms never bring in a NaN."""
    outputs, terms = m.index.shape
    shape = (*x.shape[:axis], outputs, *x.shape[axis + 1 :])
    if terms == 0 or 0 in shape or x.size == 0:
        return jnp.zeros(shape, x.dtype)
    if m.alike:
        return _apply_tables(x, axis, m)
    unit, complete = bool(np.all((m.weight == 1) | (m.weight == 0))), bool(np.all(m.weight != 0))
    if terms == 1 and unit and complete:
        return _select(x, axis, m.index[:, 0], m.size)
    if unit and complete and np.array_equal(m.index.reshape(-1), np.arange(m.size)):
        return jnp.sum(x.reshape(*shape[: axis + 1], terms, *shape[axis + 1 :]), axis=axis + 1)
    if terms > _UNROLL:
        y = _select(x, axis, m.index.reshape(-1), m.size)
        y = _weigh(y.reshape(*shape[: axis + 1], terms, *shape[axis + 1 :]), axis, m.weight)
        return jnp.sum(y, axis=axis + 1)
    parts = [
        _weigh(_select(x, axis, m.index[:, j], m.size), axis, m.weight[:, j]) for j in range(terms)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _apply_tables(x: jax.Array, axis: int, m: WeightedGather) -> jax.Array:
    """As `apply`, by ops that do not depend on what the map holds."""
    selects = m.index.shape[1] == 1  # each of an input that there is, by a weight of 1
    parts = []
    for index, weight in zip(m.index.T, m.weight.T):
        part = jnp.take(x, table(index, np.int32), axis=axis, mode="clip")
        if not selects:
            weight = weight.reshape((-1,) + (1,) * (x.ndim - axis - 1))
            zero = jnp.zeros((), x.dtype)
            part = jnp.where(table(weight != 0, bool), part * table(weight, x.dtype), zero)
        parts.append(part)
    return functools.reduce(jnp.add, parts)


def apply_transposed(x: jax.Array, axis: int, m: WeightedGather) -> jax.Array:
    """Apply the map of the gradient along one axis: `apply` of ``m.transpose()``."""
    outputs, _ = m.index.shape
    if not m.alike or not 0 < outputs * m.size <= DENSE or x.size == 0:
        return apply(x, axis, m.transpose())
    # How many outputs read an input depends on the sizes, so each is asked for each.
    weight = np.zeros((m.size, outputs))
    np.add.at(weight, (m.index.T, np.arange(outputs)), m.weight.T)
    return sum_weighted(x, axis, weight != 0, weight)


def sum_weighted(
    x: jax.Array,
    axis: int,
    present: np.ndarray[Any, Any],
    weight: np.ndarray[Any, Any] | None = None,
) -> jax.Array:
    """The map along one axis that is given by a matrix ``[outputs, size]``.

    Args:
        x: The operand.
        axis: The axis.
        present: Inputs that each output sums up.
        weight: Their weights; 1 unless given.
    """
    shape = (*present.shape, *(1,) * (x.ndim - axis - 1))
    terms = jnp.expand_dims(x, axis)
    if weight is not None:
        terms = terms * table(weight.reshape(shape), x.dtype)
    kept = jnp.where(table(present.reshape(shape), bool), terms, jnp.zeros((), x.dtype))
    return jnp.sum(kept, axis + 1)


def _weigh(x: jax.Array, axis: int, weight: np.ndarray[Any, Any]) -> jax.Array:
    """``x`` times weights that begin at ``axis``; where a weight is 0 the result is 0."""
    shape = (1,) * axis + weight.shape + (1,) * (x.ndim - axis - weight.ndim)
    weight = weight.reshape(shape)
    present = weight != 0
    if np.any(weight[present] != 1):
        x = x * table(weight, x.dtype)
    return x if np.all(present) else jnp.where(table(present, bool), x, jnp.zeros((), x.dtype))


def _runs(index: np.ndarray[Any, Any]) -> list[tuple[int, int, int]]:
    """``index`` as runs ``(first, step, count)`` of one step each, which is greedy, not minimal."""
    runs, i, n = [], 0, len(index)
    steps = np.diff(index)
    while i < n:
        j = i
        while j < n - 1 and steps[j] == steps[i]:
            j += 1
        runs.append((int(index[i]), int(steps[i]) if j > i else 1, j - i + 1))
        i = j + 1
    return runs


def _select(x: jax.Array, axis: int, index: np.ndarray[Any, Any], size: int) -> jax.Array:
    """``x`` at ``index`` along ``axis``; slices and repeats are written as such, else a gather."""
    count = len(index)
    if count % size == 0 and np.array_equal(index, np.arange(count) // (count // size)):
        return x if count == size else jnp.repeat(x, count // size, axis=axis)
    runs = _runs(index)
    if len(runs) <= _RUNS:
        parts = [_run(x, axis, *run) for run in runs]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)
    return jnp.take(x, table(index, np.int32), axis=axis, mode="clip")


def _run(x: jax.Array, axis: int, first: int, step: int, count: int) -> jax.Array:
    if step == 0:
        one = jax.lax.slice_in_dim(x, first, first + 1, axis=axis)
        return jnp.broadcast_to(one, (*x.shape[:axis], count, *x.shape[axis + 1 :]))
    last = first + step * (count - 1)
    low, high = min(first, last), max(first, last)
    part = jax.lax.slice_in_dim(x, low, high + 1, abs(step), axis)
    return part if step > 0 else jax.lax.rev(part, (axis,))
