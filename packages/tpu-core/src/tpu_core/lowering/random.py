"""Random bits by Threefry-2x32, and the ops that draw from uniform, normal and Bernoulli.

Every element is a function of the call's key and of its own linear index, never of how many there
are: a longer draw starts with the shorter one, and no execution mode changes a number. The 20
rounds are unrolled in an outlined function: on XLA:CPU a loop over them runs 4 to 5 times slower.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, float_dtype, is_float, op_math
from tpu_core.lowering.registry import lowering

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
# The high counter word of derived keys: no element has so large an index.
_KEY_DOMAIN = np.uint32(0xFFFFFFFF)


def threefry2x32(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds, elementwise (Salmon et al., SC 2011)."""
    schedule = (*key, key[0] ^ key[1] ^ _PARITY)
    x, y = counter[0] + key[0], counter[1] + key[1]
    for block in range(5):
        for bits in _ROTATIONS[block % 2]:
            x = x + y
            y = lax.shift_left(y, np.uint32(bits)) | lax.shift_right_logical(
                y, np.uint32(32 - bits)
            )
            y = y ^ x
        x = x + schedule[(block + 1) % 3]
        y = y + (schedule[(block + 2) % 3] + np.uint32(block + 1))
    return x, y


def derive_key(seed_lo: Any, seed_hi: Any, offset_lo: Any, offset_hi: Any) -> jax.Array:
    """The ``uint32[2]`` key of one call from a generator's 64-bit seed and offset."""
    words = [cast(w, np.uint32) for w in (seed_lo, seed_hi, offset_hi, offset_lo)]
    return jnp.stack(threefry2x32((words[0], words[1]), (words[2], words[3])))


def fold_in(key: jax.Array, number: Any) -> jax.Array:
    """An independent key for the ``number``-th draw of one call."""
    counter = (jnp.asarray(_KEY_DOMAIN), cast(number, np.uint32))
    return jnp.stack(threefry2x32((key[0], key[1]), counter))


def _counter(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """High and low words of each element's linear index."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    word = np.uint32 if math.prod(shape) <= 2**32 else np.uint64
    index = jnp.zeros(shape, word)
    for d, stride in enumerate(strides):
        if shape[d] != 1:
            index = index + lax.broadcasted_iota(word, shape, d) * np.array(stride, word)
    if word is np.uint32:
        return jnp.zeros(shape, np.uint32), index
    return (index >> np.uint64(32)).astype(np.uint32), index.astype(np.uint32)


@functools.partial(jax.jit, static_argnums=1)
def random_words(key: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Two independent ``uint32`` an element."""
    return threefry2x32((key[0], key[1]), _counter(shape))


def random_bits(key: jax.Array, shape: Sequence[int], bits: int = 32) -> jax.Array:
    """Random ``uint32``, or ``uint64`` with ``bits=64``; the former is the latter's high word."""
    high, low = random_words(key, tuple(shape))
    if bits == 32:
        return high
    return (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)


def uniform01(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Uniform in [0, 1): multiples of 2^-(mantissa bits), so that rounding never gives 1."""
    digits = int(jnp.finfo(dtype).nmant) + 1
    bits = 64 if digits > 32 else 32
    wide = op_math(dtype)
    value = random_bits(key, shape, bits)
    value = lax.shift_right_logical(value, value.dtype.type(bits - digits)).astype(wide)
    return cast(value * wide.type(2.0**-digits), dtype)


def open_uniform(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Uniform in (0, 1] for logarithms, as fine near 0 as 32 (float64: 64) bits allow."""
    dtype = np.dtype(dtype)
    bits = 64 if dtype == np.float64 else 32
    value = random_bits(key, shape, bits).astype(dtype)
    return (value + dtype.type(0.5)) * dtype.type(2.0**-bits)


# Giles, "Approximating the erfinv function" (2010), single precision, highest power first.
_CENTRAL = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
    -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


def standard_normal(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Normal numbers by the inverse of the error function.

    One bit is the sign and 31 bits the tail's probability u, so that u near 0 keeps full relative
    precision: float32 reaches 6.3 sigma (24 bits in a plain ``erf_inv(2u - 1)`` end at 5.4). The
    quantile is off by a relative 4e-4 at the outermost value, 1e-6 within 5.7 sigma.
    """
    if np.dtype(dtype) == np.float64:
        bits = random_bits(key, shape, 64)
        value = (bits >> np.uint64(11)).astype(np.float64) + np.float64(0.5)
        return np.float64(math.sqrt(2)) * lax.erf_inv(value * np.float64(2.0**-52) - np.float64(1))
    bits = random_bits(key, shape)
    tail = (bits >> np.uint32(1)).astype(np.float32) + np.float32(0.5)
    tail = tail * np.float32(2.0**-32)
    w = -jnp.log(np.float32(4) * tail * (np.float32(1) - tail))  # -log(1 - x^2), x = 1 - 2 tail
    central = w < np.float32(5)
    s = jnp.where(central, w - np.float32(2.5), jnp.sqrt(w) - np.float32(3))
    value = jnp.where(central, np.float32(_CENTRAL[0]), np.float32(_TAIL[0]))
    for inner, outer in zip(_CENTRAL[1:], _TAIL[1:]):
        value = value * s + jnp.where(central, np.float32(inner), np.float32(outer))
    value = value * (np.float32(1) - np.float32(2) * tail) * np.float32(math.sqrt(2))
    return cast(jnp.where((bits & np.uint32(1)) == 0, value, -value), dtype)


def bernoulli_mask(key: jax.Array, shape: Sequence[int], p: jax.Array) -> jax.Array:
    """True with probability ``p`` (float32 or float64), to 2^-32; always at 1, never at 0."""
    threshold = jnp.clip(p, 0, 1 - float(jnp.finfo(p.dtype).epsneg)) * p.dtype.type(2.0**32)
    return (random_bits(key, shape) < threshold.astype(np.uint32)) | (p >= 1)


def random_below(key: jax.Array, shape: Sequence[int], count: int) -> jax.Array:
    """Uniform integers in [0, ``count``), 1 <= count <= 2^64, as ``uint32`` or ``uint64``.

    Up to 2^32 the high word of a 96-bit product, whose bias is below 2^-32 (ATen's remainder of 32
    bits doubles some probabilities); beyond, ATen's remainder of 64 bits.
    """
    if count & (count - 1) == 0:
        bits = count.bit_length() - 1
        if bits <= 32:
            value = random_bits(key, shape)
            return value >> np.uint32(32 - bits) if bits else jnp.zeros_like(value)
        return random_bits(key, shape, 64) >> np.uint64(64 - bits)
    if count > 2**32:
        return lax.rem(random_bits(key, shape, 64), jnp.full(tuple(shape), count, np.uint64))
    high, low = random_words(key, tuple(shape))
    factor = np.uint64(count)
    carry = (low.astype(np.uint64) * factor) >> np.uint64(32)
    return ((high.astype(np.uint64) * factor + carry) >> np.uint64(32)).astype(np.uint32)


def drawing_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype to draw real numbers in that become ``dtype``."""
    return op_math(dtype) if is_float(dtype) else np.dtype(np.float32)


def scaled_uniform(key: jax.Array, shape: Sequence[int], dtype: Any, low: Any, high: Any) -> Any:
    """Uniform in [low, high): a value that rounds to ``high`` becomes ``low``, as on CUDA.

    Both parts of a complex number are.
    """
    dtype = np.dtype(dtype)
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        parts = [scaled_uniform(fold_in(key, i), shape, part, low, high) for i in range(2)]
        return lax.complex(*parts)
    wide = op_math(dtype)
    low, high = cast(low, wide), cast(high, wide)
    value = cast(uniform01(key, shape, dtype), wide) * (high - low) + low
    value = cast(value, dtype)
    return jnp.where(value == cast(high, dtype), cast(low, dtype), value)


@lowering("aten.uniform.default", random=True)
def uniform(x: jax.Array, *bounds: Any, key: jax.Array, **named: Any) -> jax.Array:
    # "from" is a keyword of Python, so it cannot be a parameter.
    low = bounds[0] if bounds else named.get("from", 0.0)
    high = bounds[1] if len(bounds) > 1 else named.get("to", 1.0)
    return scaled_uniform(key, x.shape, x.dtype, low, high)


@lowering("aten.rand.default", "aten.rand.generator", random=True)
def rand(size: Sequence[int], dtype: Any = None, *, key: jax.Array, out: Any) -> jax.Array:
    return _uniform_like_out(key, out)


@lowering("aten.rand_like.default", "aten.rand_like.generator", random=True)
def rand_like(x: jax.Array, dtype: Any = None, *, key: jax.Array, out: Any) -> jax.Array:
    return _uniform_like_out(key, out)


def _uniform_like_out(key: jax.Array, out: Any) -> jax.Array:
    shape, dtype = out[0].shape, np.dtype(out[0].dtype)
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return lax.complex(
            uniform01(fold_in(key, 0), shape, part), uniform01(fold_in(key, 1), shape, part)
        )
    return uniform01(key, shape, dtype)


def _normal(key: jax.Array, shape: Sequence[int], dtype: Any, mean: Any, std: Any) -> jax.Array:
    """``mean + std * z``; a complex number's two parts share the variance."""
    dtype = np.dtype(dtype)
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        parts = [standard_normal(fold_in(key, i), shape, part) for i in range(2)]
        scale = cast(std, part) * part.type(math.sqrt(0.5))
        return lax.complex(parts[0] * scale, parts[1] * scale) + cast(mean, dtype)
    wide = op_math(dtype)
    return cast(standard_normal(key, shape, wide) * cast(std, wide) + cast(mean, wide), dtype)


@lowering("aten.normal_functional.default", random=True)
def normal_functional(
    x: jax.Array, mean: Any = 0.0, std: Any = 1.0, *, key: jax.Array
) -> jax.Array:
    return _normal(key, x.shape, x.dtype, mean, std)


@lowering(
    "aten.normal.Tensor_float",
    "aten.normal.float_Tensor",
    "aten.normal.Tensor_Tensor",
    random=True,
)
def normal(mean: Any, std: Any = 1.0, *, key: jax.Array, out: Any) -> jax.Array:
    return _normal(key, out[0].shape, out[0].dtype, mean, std)


@lowering("aten.normal.float_float", random=True)
def normal_of_size(
    mean: Any, std: Any, size: Sequence[int], dtype: Any = None, *, key: jax.Array, out: Any
) -> jax.Array:
    return _normal(key, out[0].shape, out[0].dtype, mean, std)


@lowering("aten.randn.default", "aten.randn.generator", random=True)
def randn(size: Sequence[int], dtype: Any = None, *, key: jax.Array, out: Any) -> jax.Array:
    return _normal(key, out[0].shape, out[0].dtype, 0.0, 1.0)


@lowering("aten.randn_like.default", "aten.randn_like.generator", random=True)
def randn_like(x: jax.Array, dtype: Any = None, *, key: jax.Array, out: Any) -> jax.Array:
    return _normal(key, out[0].shape, out[0].dtype, 0.0, 1.0)


@lowering("aten.bernoulli.default", random=True)
def bernoulli(x: jax.Array, *, key: jax.Array) -> jax.Array:
    """Probabilities are the tensor's own elements."""
    return cast(bernoulli_mask(key, x.shape, cast(x, drawing_dtype(x.dtype))), x.dtype)


@lowering("aten.bernoulli.p", "aten.bernoulli.Tensor", random=True)
def bernoulli_p(x: jax.Array, p: Any = 0.5, *, key: jax.Array) -> jax.Array:
    dtype = p.dtype if is_float(getattr(p, "dtype", np.int32)) and p.ndim else np.float32
    return cast(bernoulli_mask(key, x.shape, cast(p, op_math(dtype))), x.dtype)


@lowering("aten.native_dropout.default", random=True)
def native_dropout(
    x: jax.Array, p: Any, train: bool | None = True, *, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Result and mask. A dropped NaN or infinity becomes 0, where PyTorch's product gives NaN.

    XLA turns a product with a mask into a selection anyway, so the product would depend on fusion.
    """
    if train is False:
        return x, jnp.ones(x.shape, np.bool_)
    wide = op_math(x.dtype)
    real = np.dtype(f"f{wide.itemsize // 2}") if wide.kind == "c" else wide
    keep = 1 - cast(p, real)
    mask = bernoulli_mask(key, x.shape, keep)
    return _masked_scale(x, mask, 1 / keep), mask


@lowering("aten.native_dropout_backward.default")
def native_dropout_backward(grad_output: jax.Array, mask: jax.Array, scale: Any) -> jax.Array:
    x = cast(grad_output, float_dtype(grad_output.dtype))  # of integers too, as by a product
    return _masked_scale(x, mask, scale)


def _masked_scale(x: jax.Array, mask: jax.Array, scale: Any) -> jax.Array:
    wide = op_math(x.dtype)
    scaled = cast(cast(x, wide) * cast(scale, wide), x.dtype)
    return jnp.where(mask, scaled, np.array(0, x.dtype))
