"""Random draws from named distributions: exponential, geometric, Poisson, gamma and the like.

Rejection samplers loop until every element has accepted. Round t draws with the key folded with t,
so that an element's number depends on its own parameters and index only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.random import (
    drawing_dtype,
    fold_in,
    open_uniform,
    random_words,
    standard_normal,
)
from tpu_core.lowering.registry import lowering

# A bound on rejection rounds, for parameters (NaN) that accept nothing. Each round accepts with
# probability above 0.7; Knuth's product for a mean below 10 takes 60 rounds once in 1e25.
_MAX_ROUNDS = 200


def _exponential(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Standard exponential, never 0 (as on CUDA), so that dividing by it is safe."""
    draw = -jnp.log(open_uniform(key, shape, dtype))
    return jnp.maximum(draw, np.array(jnp.finfo(dtype).eps / 2, dtype))


@lowering("aten.exponential.default", random=True)
def exponential(x: jax.Array, lambd: Any = 1.0, *, key: jax.Array) -> jax.Array:
    wide = drawing_dtype(x.dtype)
    return cast(_exponential(key, x.shape, wide) / cast(lambd, wide), x.dtype)


@lowering("aten.geometric.default", random=True)
def geometric(x: jax.Array, p: Any, *, key: jax.Array) -> jax.Array:
    """Number of trials up to the first success, at least 1."""
    wide = drawing_dtype(x.dtype)
    trials = jnp.ceil(_exponential(key, x.shape, wide) / -jnp.log1p(-cast(p, wide)))
    return cast(jnp.maximum(trials, np.array(1, wide)), x.dtype)


@lowering("aten.cauchy.default", random=True)
def cauchy(x: jax.Array, median: Any = 0.0, sigma: Any = 1.0, *, key: jax.Array) -> jax.Array:
    """``tan(pi (u - 1/2))`` as the cotangent of a u that is fine near 0, with a random sign."""
    wide = drawing_dtype(x.dtype)
    word, sign = random_words(key, x.shape)
    half = (word.astype(wide) + wide.type(0.5)) * wide.type(math.pi * 2.0**-33)
    draw = wide.type(1) / jnp.tan(half)
    draw = jnp.where((sign & np.uint32(1)) == 0, draw, -draw)
    return cast(cast(median, wide) + cast(sigma, wide) * draw, x.dtype)


@lowering("aten.log_normal.default", random=True)
def log_normal(x: jax.Array, mean: Any = 1.0, std: Any = 2.0, *, key: jax.Array) -> jax.Array:
    wide = drawing_dtype(x.dtype)
    draw = standard_normal(key, x.shape, wide)
    return cast(jnp.exp(draw * cast(std, wide) + cast(mean, wide)), x.dtype)


def _uniform_pair(key: jax.Array, shape: Sequence[int], dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Two independent uniform draws in (0, 1]."""
    dtype = np.dtype(dtype)
    if dtype == np.float64:
        first, second = (open_uniform(fold_in(key, i), shape, dtype) for i in range(2))
        return first, second
    first, second = (
        (w.astype(dtype) + dtype.type(0.5)) * dtype.type(2.0**-32)
        for w in random_words(key, tuple(shape))
    )
    return first, second


def _reject(
    key: jax.Array, start: Any, round_: Callable[[jax.Array, Any], tuple[Any, jax.Array]]
) -> Any:
    """Repeat ``round_(key, state) -> (state, done)``; a done element keeps its state.

    ``start`` is a tuple of arrays of one shape.
    """

    def body(carry: Any) -> Any:
        count, state, done = carry
        new, now_done = round_(fold_in(key, count), state)
        state = tuple(jnp.where(done, old, n) for old, n in zip(state, new))
        return count + np.int32(1), state, done | now_done

    def unfinished(carry: Any) -> jax.Array:
        count, _, done = carry
        return (count < _MAX_ROUNDS) & ~jnp.all(done)

    done = jnp.zeros(start[0].shape, np.bool_)
    return lax.while_loop(unfinished, body, (jnp.zeros((), np.int32), start, done))[1]


def _stirling_tail(k: jax.Array) -> jax.Array:
    """``log k! - log(sqrt(2 pi) ((k + 1) / e)^(k + 1/2) ...)``, Hoermann's correction term."""
    inverse = 1 / (k + 1)
    square = inverse * inverse
    return (1 / 12 - (1 / 360 - square / 1260) * square) * inverse


def _poisson_log_pmf(k: jax.Array, mean: jax.Array) -> jax.Array:
    """Log probability by Stirling's series, without the cancellation of ``k log(mean) - mean``."""
    safe = jnp.maximum(k, 1)
    x = (mean - safe) / safe
    log_pmf = safe * (jnp.log1p(x) - x) - 0.5 * jnp.log(2 * math.pi * safe)
    log_pmf = log_pmf - (1 / 12 - 1 / (360 * safe * safe)) / safe
    return jnp.where(k < 1, -mean, log_pmf)


@lowering("aten.poisson.default", random=True)
def poisson(x: jax.Array, *, key: jax.Array) -> jax.Array:
    """Knuth's product of uniforms below a mean of 10, Hoermann's PTRS (1993) from there on."""
    wide = op_math(x.dtype)
    mean = cast(x, wide)
    large = mean >= 10
    rate = jnp.where(large, mean, 10)
    b = 0.931 + 2.53 * jnp.sqrt(rate)
    a = -0.059 + 0.02483 * b
    log_inverse_alpha = jnp.log(1.1239 + 1.1328 / (b - 3.4))
    v_r = 0.9277 - 3.6224 / (b - 2)

    def round_(key: jax.Array, state: Any) -> tuple[Any, jax.Array]:
        count, log_product = state
        first, second = _uniform_pair(key, x.shape, wide)
        log_product = log_product + jnp.log(first)
        stopped = log_product <= -mean
        u = first - 0.5
        us = jnp.maximum(0.5 - jnp.abs(u), float(jnp.finfo(wide).tiny))
        k = jnp.floor((2 * a / us + b) * u + rate + 0.43)
        quick = (us >= 0.07) & (second <= v_r)
        impossible = (k < 0) | ((us < 0.013) & (second > us))
        bound = jnp.log(second) + log_inverse_alpha - jnp.log(a / (us * us) + b)
        accepted = quick | (~impossible & (bound <= _poisson_log_pmf(k, rate)))
        count = jnp.where(large, k, jnp.where(stopped, count, count + 1))
        return (count, log_product), jnp.where(large, accepted, stopped)

    zeros = jnp.zeros(x.shape, wide)
    return cast(_reject(key, (zeros, zeros), round_)[0], x.dtype)


@lowering("aten.binomial.default", random=True)
def binomial(count: jax.Array, prob: jax.Array, *, key: jax.Array, out: Any) -> jax.Array:
    """Sums of geometric waits where fewer than 10 successes are expected, else Hoermann's BTRS.

    Successes or failures are counted, whichever are rarer (aten ``sample_binomial``).
    """
    shape = out[0].shape
    wide = drawing_dtype(out[0].dtype)
    n = jnp.broadcast_to(cast(count, wide), shape)
    p = jnp.broadcast_to(cast(prob, wide), shape)
    flipped = p > 0.5
    p = jnp.where(flipped, 1 - p, p)
    large = n * p >= 10
    n_safe, p_safe = jnp.where(large, n, 40), jnp.where(large, p, 0.5)
    deviation = jnp.sqrt(n_safe * p_safe * (1 - p_safe))
    b = 1.15 + 2.53 * deviation
    a = -0.0873 + 0.0248 * b + 0.01 * p_safe
    v_r = 0.92 - 4.2 / b
    ratio = p_safe / (1 - p_safe)
    alpha = (2.83 + 5.1 / b) * deviation
    mode = jnp.floor((n_safe + 1) * p_safe)
    log_failure = jnp.log1p(-p)

    def round_(key: jax.Array, state: Any) -> tuple[Any, jax.Array]:
        successes, trials = state
        first, second = _uniform_pair(key, shape, wide)
        # A wait of at least one trial; without successes (p = 0) it is infinite.
        wait = jnp.maximum(jnp.ceil(jnp.log(first) / log_failure), 1)
        trials = trials + jnp.where(p > 0, wait, math.inf)
        stopped = trials > n
        u = first - 0.5
        us = jnp.maximum(0.5 - jnp.abs(u), float(jnp.finfo(wide).tiny))
        k = jnp.floor((2 * a / us + b) * u + n_safe * p_safe + 0.5)
        quick = (us >= 0.07) & (second <= v_r)
        inside = (k >= 0) & (k <= n_safe)
        k_safe = jnp.clip(k, 0, n_safe)
        bound = (
            (mode + 0.5) * jnp.log((mode + 1) / (ratio * (n_safe - mode + 1)))
            + (n_safe + 1) * jnp.log1p((k_safe - mode) / (n_safe - k_safe + 1))
            + (k_safe + 0.5) * jnp.log(ratio * (n_safe - k_safe + 1) / (k_safe + 1))
            + _stirling_tail(mode)
            + _stirling_tail(n_safe - mode)
            - _stirling_tail(k_safe)
            - _stirling_tail(n_safe - k_safe)
        )
        accepted = quick | (inside & (jnp.log(second * alpha / (a / (us * us) + b)) <= bound))
        successes = jnp.where(large, k, jnp.where(stopped, successes, successes + 1))
        return (successes, trials), jnp.where(large, accepted, stopped)

    zeros = jnp.zeros(shape, wide)
    successes = _reject(key, (zeros, zeros), round_)[0]
    return cast(jnp.where(flipped, n - successes, successes), out[0].dtype)


def _log_gamma_draw(key: jax.Array, alpha: jax.Array) -> jax.Array:
    """Logarithm of a standard gamma draw (Marsaglia and Tsang, 2000), which never underflows."""
    dtype = alpha.dtype
    boosted = jnp.where(alpha < 1, alpha + 1, alpha)
    d = boosted - 1 / 3
    c = 1 / jnp.sqrt(9 * d)

    def round_(key: jax.Array, state: Any) -> tuple[Any, jax.Array]:
        x = standard_normal(fold_in(key, 0), alpha.shape, dtype)
        u = open_uniform(fold_in(key, 1), alpha.shape, dtype)
        root = 1 + c * x
        log_v = 3 * jnp.log(jnp.maximum(root, float(jnp.finfo(dtype).tiny)))
        v = root * root * root
        accepted = (root > 0) & (jnp.log(u) < 0.5 * x * x + d * (1 - v + log_v))
        return (log_v,), accepted

    (log_v,) = _reject(fold_in(key, 0), (jnp.zeros(alpha.shape, dtype),), round_)
    # A draw for alpha + 1 times u^(1 / alpha) is one for alpha.
    log_u = jnp.log(open_uniform(fold_in(key, 1), alpha.shape, dtype))
    return jnp.log(d) + log_v + jnp.where(alpha < 1, log_u / alpha, 0)


@lowering("aten._standard_gamma.default", random=True)
def standard_gamma(x: jax.Array, *, key: jax.Array) -> jax.Array:
    """At least the smallest normal number, as in aten ``_s_gamma_cpu``."""
    draw = cast(jnp.exp(_log_gamma_draw(key, cast(x, op_math(x.dtype)))), x.dtype)
    return jnp.maximum(draw, np.array(jnp.finfo(x.dtype).tiny, x.dtype))


@lowering("aten._standard_gamma_grad.default")
def standard_gamma_grad(x: jax.Array, output: jax.Array) -> jax.Array:
    """The derivative of the draw ``output`` with respect to its alpha ``x``."""
    wide = op_math(x.dtype)
    return cast(lax.random_gamma_grad(cast(x, wide), cast(output, wide)), x.dtype)


@lowering("aten._sample_dirichlet.default", random=True)
def sample_dirichlet(x: jax.Array, *, key: jax.Array) -> jax.Array:
    """Gamma draws normalised over the last dimension, in logarithms; inside (0, 1)."""
    draw = jax.nn.softmax(_log_gamma_draw(key, cast(x, op_math(x.dtype))), axis=-1)
    info = jnp.finfo(x.dtype)
    low, high = np.array(info.tiny, x.dtype), np.array(1 - float(info.epsneg), x.dtype)
    return jnp.clip(cast(draw, x.dtype), low, high)
