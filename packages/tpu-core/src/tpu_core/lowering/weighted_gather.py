"""Linear maps along one axis: each output is a weighted sum of few, statically known, inputs.

Resampling, adaptive pooling and padding are such maps along each spatial axis in turn, and their
gradients are the maps' transposes, so that no gradient needs a scatter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_core.lowering.tables import table

# Up to this many terms are added one by one, which fuses; more are gathered and reduced.
_UNROLL = 8
# An index that is at most this many runs of equal steps is slices, not a gather.
_RUNS = 4
# Pairs of an input and an output up to which all of them are candidates, so that the ops are the
# same at all sizes. Beyond, the number of candidates is a power of two.
_DENSE = 4096


@dataclass(frozen=True)
class WeightedGather:
    """``y[i] = sum_j weight[i, j] * x[index[i, j]]``.

    Attributes:
        index: ``[outputs, terms]`` positions in the input.
        weight: ``[outputs, terms]``; exactly 0 marks a term that does not exist.
        size: Length of the input's axis.
        alike: Whether maps of other sizes are to be the same ops with other tables, so that padded
            arrays serve them; else an index that is few slices becomes slices.
        terms_vary: Whether maps of other sizes have other numbers of terms.
    """

    index: np.ndarray[Any, Any]
    weight: np.ndarray[Any, Any]
    size: int
    alike: bool = False
    terms_vary: bool = False

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
        return WeightedGather(index, weight, len(self.index), self.alike, terms_vary=True)

    def matrix(self) -> np.ndarray[Any, Any]:
        """The weights of all inputs, ``[outputs, size]``."""
        weight = np.zeros((len(self.index), self.size))
        np.add.at(weight, (np.arange(len(self.index)), self.index.T), self.weight.T)
        return weight


def apply(x: jax.Array, axis: int, m: WeightedGather) -> jax.Array:
    """Apply a map along one axis, in ``x``'s dtype. Missing terms never bring in a NaN."""
    if not m.alike:  # terms that no output has
        used = np.any(m.weight != 0, axis=0)
        m = replace(m, index=m.index[:, used], weight=m.weight[:, used])
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
    if m.terms_vary:
        y, weight = candidates(x, axis, m)
        return jnp.sum(_weigh_by_table(y, axis, weight), axis=axis + 1)
    parts = []
    for index, weight in zip(m.index.T, m.weight.T):
        part = jnp.take(x, table(index, np.int32), axis=axis, mode="clip")
        # One term is an input that there is, by a weight of 1.
        parts.append(part if m.weight.shape[1] == 1 else _weigh_by_table(part, axis, weight))
    return functools.reduce(jnp.add, parts)


def candidates(
    x: jax.Array, axis: int, m: WeightedGather
) -> tuple[jax.Array, np.ndarray[Any, Any]]:
    """The inputs that outputs may read, by ops that do not depend on what the map holds.

    Args:
        x: The operand.
        axis: The axis.
        m: The map.

    Returns:
        ``x`` with (outputs, candidates) in place of the axis, where outputs may be 1 for all, and
        the weights ``[outputs, candidates]``, which are 0 where a candidate is none.
    """
    outputs, terms = m.index.shape
    if outputs * m.size <= _DENSE:
        return jnp.expand_dims(x, axis), m.matrix()
    missing = ((0, 0), (0, (1 << (terms - 1).bit_length()) - terms))
    index, weight = np.pad(m.index, missing), np.pad(m.weight, missing)
    return jnp.take(x, table(index, np.int32), axis=axis, mode="clip"), weight


def _weigh_by_table(x: jax.Array, axis: int, weight: np.ndarray[Any, Any]) -> jax.Array:
    """As `_weigh`, by ops that do not depend on the weights."""
    weight = weight.reshape(*weight.shape, *(1,) * (x.ndim - axis - weight.ndim))
    return jnp.where(table(weight != 0, bool), x * table(weight, x.dtype), jnp.zeros((), x.dtype))


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
