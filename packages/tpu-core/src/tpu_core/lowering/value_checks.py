"""Checks of what ops compute with: divisors that are zero, probabilities that are none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.lowering.checks import ALL, Finding, check, fixed, has_elements

_ZERO = fixed(RuntimeError, "ZeroDivisionError")
_CHANCE = fixed(
    RuntimeError,
    "Expected p_in >= 0 && p_in <= 1 to be true, but got false.  (Could this error message be "
    "improved?  If so, please report an enhancement request to PyTorch.)",
)


def _divides_integers(plan: Any) -> bool:
    return has_elements(plan) and all(a.dtype.kind in "iub" for a in plan.reads)


def _is_integer(x: Any) -> bool:
    if isinstance(x, (bool, int)):
        return True
    dtype = getattr(x, "dtype", None)
    return dtype is not None and np.dtype(dtype).kind in "iub"


@check(
    "aten.div.Tensor_mode",
    "aten.floor_divide.default",
    "aten.remainder.Tensor",
    "aten.remainder.Scalar_Tensor",
    "aten.fmod.Tensor",
    level=ALL,
    applies=_divides_integers,
)
def division(x: Any, y: jax.Array, *, rounding_mode: str | None = "floor") -> Iterator[Finding]:
    if rounding_mode is None or not (_is_integer(x) and _is_integer(y)):
        return
    if y.size == 0 or 0 in np.broadcast_shapes(np.shape(x), y.shape):
        return
    zero = y.astype(jnp.result_type(x, y)) == 0
    yield Finding(jnp.any(zero), 0, _ZERO)


@check("aten.multinomial.default", applies=has_elements)
def multinomial(
    x: jax.Array, num_samples: int, replacement: bool = False, **_: Any
) -> Iterator[Finding]:
    if x.size == 0:
        return
    # As the CPU's two kernels: the first stands for samples without replacement, or for one.
    if not replacement or num_samples == 1:
        bad = jnp.any(~(jnp.isfinite(x) & (x >= 0)))
        text = "probability tensor contains either `inf`, `nan` or element < 0"
        yield Finding(bad, 0, fixed(RuntimeError, text))
        none = jnp.any(jnp.max(x, axis=-1) <= 0)
        text = "invalid multinomial distribution (sum of probabilities <= 0)"
        yield Finding(none, 0, fixed(RuntimeError, text))
        return
    problems = (
        ("encountering probability entry < 0", x < 0),
        ("encountering probability entry = infinity or NaN", ~jnp.isfinite(x)),
        ("sum of probabilities <= 0", jnp.max(x, axis=-1) <= 0),
    )
    for name, mask in problems:
        text = f"invalid multinomial distribution ({name})"
        yield Finding(jnp.any(mask), 0, fixed(RuntimeError, text))


@check("aten.bernoulli.default", applies=has_elements)
def bernoulli(p: jax.Array, **_: Any) -> Iterator[Finding]:
    yield from _chances(p)


@check("aten.bernoulli.Tensor", applies=has_elements)
def bernoulli_like(x: jax.Array, p: jax.Array, **_: Any) -> Iterator[Finding]:
    yield from _chances(p)


def _chances(p: jax.Array) -> Iterator[Finding]:
    if p.size:
        yield Finding(jnp.any(~((p >= 0) & (p <= 1))), 0, _CHANCE)


@check("aten.normal.Tensor_Tensor", "aten.normal.float_Tensor", applies=has_elements)
def normal(mean: Any, std: jax.Array, **_: Any) -> Iterator[Finding]:
    if std.size:
        text = "normal expects all elements of std >= 0.0"
        yield Finding(jnp.any(~(std >= 0)), 0, fixed(RuntimeError, text))


@check("aten.poisson.default", applies=has_elements)
def poisson(x: jax.Array, **_: Any) -> Iterator[Finding]:
    if x.size:
        text = "invalid Poisson rate, expected rate to be non-negative"
        yield Finding(jnp.any(~(x >= 0)), 0, fixed(RuntimeError, text))


@check("aten.binary_cross_entropy.default", applies=has_elements)
def binary_cross_entropy(x: jax.Array, *_: Any, **__: Any) -> Iterator[Finding]:
    if x.size:
        text = "all elements of input should be between 0 and 1"
        yield Finding(jnp.any(~((x >= 0) & (x <= 1))), 0, fixed(RuntimeError, text))


@check("aten.histc.default", applies=has_elements)
def histc(x: jax.Array, bins: int = 100, min: Any = 0, max: Any = 0) -> Iterator[Finding]:
    """The range of the data, where it is asked for, as its bounds in float32, side by side."""
    if x.size == 0:
        return
    bounds = jnp.stack([jnp.min(x), jnp.max(x)]).astype(np.float32)
    is_asked_for = jnp.equal(jnp.asarray(min), jnp.asarray(max))
    bad = is_asked_for & ~jnp.all(jnp.isfinite(bounds))
    halves = lax.bitcast_convert_type(bounds, np.uint32).astype(np.int64)
    yield Finding(bad, halves[0] << np.int64(32) | halves[1], _range_error)


def _range_error(halves: int) -> Exception:
    words = np.array([halves >> 32 & 0xFFFFFFFF, halves & 0xFFFFFFFF], np.uint32)
    low, high = ("-nan" if math.isnan(v) else f"{v:g}" for v in words.view(np.float32).tolist())
    return RuntimeError(f"torch.histc: range of [{low}, {high}] is not finite")
