"""Optimizers over a dict of parameters, with PyTorch's formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

Params = dict[str, Array]


class Optimizer(NamedTuple):
    """``init(params) -> state`` and ``update(params, grads, state, rate) -> (params, state)``."""

    init: Callable[[Params], Any]
    update: Callable[[Params, Params, Any, Any], tuple[Params, Any]]


def adam(weight_decay: float = 0.0) -> Optimizer:
    """Adam, with ``weight_decay`` AdamW."""

    def init(p: Params) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, p)
        return jnp.zeros((), jnp.float32), zeros, jax.tree.map(jnp.zeros_like, p)

    def update(p: Params, g: Params, state: Any, rate: Any) -> tuple[Params, Any]:
        count, first, second = state
        count = count + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, g)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, g)
        scale1, scale2 = 1 - 0.9**count, 1 - 0.999**count

        def new(p: Array, m: Array, v: Array) -> Array:
            step = (m / scale1) / (jnp.sqrt(v / scale2) + 1e-8)
            return p - rate * (step + weight_decay * p)

        return jax.tree.map(new, p, first, second), (count, first, second)

    return Optimizer(init, update)


def sgd(momentum: float) -> Optimizer:
    """Stochastic gradient descent with momentum."""

    def init(p: Params) -> Any:
        return jax.tree.map(jnp.zeros_like, p)

    def update(p: Params, g: Params, state: Any, rate: Any) -> tuple[Params, Any]:
        state = jax.tree.map(lambda m, g: momentum * m + g, state, g)
        return jax.tree.map(lambda p, m: p - rate * m, p, state), state

    return Optimizer(init, update)


def clip(g: Params, largest: float) -> Params:
    """Scale gradients down to a norm of at most ``largest``."""
    norm = jnp.sqrt(sum(jnp.sum(x * x) for x in g.values()))
    factor = jnp.minimum(largest / (norm + 1e-6), 1.0)
    return jax.tree.map(lambda x: x * factor, g)
