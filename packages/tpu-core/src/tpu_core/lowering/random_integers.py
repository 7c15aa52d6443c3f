"""Random integers and permutations: ``random_``, ``randint``, ``randperm``, ``multinomial``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, is_float, op_math
from tpu_core.lowering.random import open_uniform, random_below, random_words, uniform01
from tpu_core.lowering.registry import lowering


def _integers(key: jax.Array, shape: Sequence[int], dtype: Any, low: int, high: int) -> jax.Array:
    """Uniform integers in [low, high) as ``dtype``; the offset is added modulo 2^64."""
    dtype = np.dtype(dtype)
    value = random_below(key, shape, high - low)
    if dtype.kind in "iu" and dtype.itemsize <= 4 and value.dtype == np.uint32:
        return cast(value + np.uint32(low % 2**32), dtype)
    value = value.astype(np.uint64) + np.uint64(low % 2**64)
    if dtype.kind != "u":
        value = lax.bitcast_convert_type(value, np.int64)
    return cast(value, dtype)


def _largest(dtype: Any) -> int:
    """The largest number that ``random_`` without a bound draws (aten ``random_from_to``)."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return 1
    if is_float(dtype):
        return 2 ** (int(jnp.finfo(dtype).nmant) + 1)
    return int(jnp.iinfo(dtype).max)


@lowering("aten.random.default", random=True)
def random(x: jax.Array, *, key: jax.Array) -> jax.Array:
    return _integers(key, x.shape, x.dtype, 0, _largest(x.dtype) + 1)


@lowering("aten.random.to", random=True)
def random_to(x: jax.Array, to: int, *, key: jax.Array) -> jax.Array:
    return _integers(key, x.shape, x.dtype, 0, to)


@lowering("aten.random.from", random=True)
def random_from(x: jax.Array, *bounds: Any, key: jax.Array, **named: Any) -> jax.Array:
    # "from" is a keyword of Python, so it cannot be a parameter.
    low = bounds[0] if bounds else named["from"]
    high = bounds[1] if len(bounds) > 1 else named.get("to")
    return _integers(key, x.shape, x.dtype, low, _largest(x.dtype) + 1 if high is None else high)


@lowering("aten.randint.default", "aten.randint.generator", random=True)
def randint(
    high: int, size: Sequence[int], dtype: Any = None, *, key: jax.Array, out: Any
) -> jax.Array:
    return _integers(key, out[0].shape, out[0].dtype, 0, high)


@lowering("aten.randint.low", "aten.randint.low_generator", random=True)
def randint_low(
    low: int, high: int, size: Sequence[int], dtype: Any = None, *, key: jax.Array, out: Any
) -> jax.Array:
    return _integers(key, out[0].shape, out[0].dtype, low, high)


@lowering("aten.randint_like.default", "aten.randint_like.generator", random=True)
def randint_like(
    x: jax.Array, high: int, dtype: Any = None, *, key: jax.Array, out: Any
) -> jax.Array:
    return _integers(key, out[0].shape, out[0].dtype, 0, high)


@lowering("aten.randint_like.low_dtype", "aten.randint_like.low_generator_dtype", random=True)
def randint_like_low(
    x: jax.Array, low: int, high: int, dtype: Any = None, *, key: jax.Array, out: Any
) -> jax.Array:
    return _integers(key, out[0].shape, out[0].dtype, low, high)


@lowering("aten.randperm.default", "aten.randperm.generator", random=True)
def randperm(n: int, dtype: Any = None, *, key: jax.Array, out: Any) -> jax.Array:
    """The order of 64 random bits an element: two are equal with probability below n^2 / 2^65."""
    order = lax.iota(np.int32 if n < 2**31 else np.int64, n)
    return lax.sort((*random_words(key, (n,)), order), num_keys=2)[2]


@lowering("aten.multinomial.default", random=True)
def multinomial(
    x: jax.Array, num_samples: int, replacement: bool = False, *, key: jax.Array
) -> jax.Array:
    """Indices drawn with the (unnormalised) probabilities of the last dimension.

    Without replacement: the largest of p / e with e exponential (aten ``multinomial``), which is
    also the cheaper way for a single sample. With: the inverse of the cumulative distribution.
    """
    p = cast(x, op_math(x.dtype))
    if num_samples == 0:
        return jnp.zeros((*x.shape[:-1], 0), np.int64)
    if not replacement or num_samples == 1:
        tiny = np.array(jnp.finfo(p.dtype).eps / 2, p.dtype)
        race = p / jnp.maximum(-jnp.log(open_uniform(key, p.shape, p.dtype)), tiny)
        if num_samples == 1:
            return jnp.argmax(race, axis=-1, keepdims=True)
        return lax.top_k(race, num_samples)[1]
    shape = (*x.shape[:-1], num_samples)
    steps = jnp.cumsum(p, axis=-1)
    total = steps[..., -1:]
    # Strictly below the total, else the draw would be past the last probable element.
    level = jnp.minimum(uniform01(key, shape, p.dtype) * total, jnp.nextafter(total, 0 * total))
    search = _search_rows if x.ndim == 2 else _search
    return jnp.minimum(search(steps, level), np.int32(x.shape[-1] - 1))


def _search(steps: jax.Array, level: jax.Array) -> jax.Array:
    return jnp.searchsorted(steps, level, side="right")


_search_rows = jax.vmap(_search)
