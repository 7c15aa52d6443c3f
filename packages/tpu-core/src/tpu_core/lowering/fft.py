"""Fourier transforms with PyTorch's normalization modes (``fft_norm_mode``, SpectralOpsUtils.h)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import FftType

from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.registry import lowering


def _normalize(x: jax.Array, mode: int, sizes: Sequence[int]) -> jax.Array:
    """Mode 0 scales by nothing, 1 by ``1 / sqrt(n)``, 2 by ``1 / n``."""
    n = math.prod(sizes)
    if mode == 0 or n <= 1:
        return x
    return _scale(x, 1.0 / math.sqrt(n) if mode == 1 else 1.0 / n)


def _scale(x: jax.Array, factor: float) -> jax.Array:
    """Multiplied by a real number, both parts of complex ones."""
    if not jnp.iscomplexobj(x):
        return x * jnp.asarray(factor, x.dtype)
    return lax.complex(_scale(x.real, factor), _scale(x.imag, factor))


def _complex(x: jax.Array) -> jax.Array:
    """Complex with a real counterpart wide enough for ``x``."""
    real = op_math(x.dtype)
    return cast(x, {"float32": np.complex64, "float64": np.complex128}.get(real.name, real))


def _along(x: jax.Array, kind: FftType, lengths: Sequence[int], axes: Sequence[int]) -> jax.Array:
    """XLA's transform, which is of the last dims; it divides what it inverts by their sizes."""
    last = range(x.ndim - len(axes), x.ndim)
    y = lax.fft(jnp.moveaxis(x, axes, last), kind, tuple(lengths))
    if kind in (FftType.IFFT, FftType.IRFFT):
        y = _scale(y, math.prod(lengths))
    return jnp.moveaxis(y, last, axes)


def _c2c(x: jax.Array, dims: Sequence[int], forward: bool) -> jax.Array:
    """Unnormalized; at most three dims at a time is what XLA transforms."""
    kind = FftType.FFT if forward else FftType.IFFT
    for start in range(0, len(dims), 3):
        axes = [d % x.ndim for d in dims[start : start + 3]]
        x = _along(x, kind, [x.shape[d] for d in axes], axes)
    return x


@lowering("aten._fft_c2c.default")
def fft_c2c(x: jax.Array, dim: Sequence[int], normalization: int, forward: bool) -> jax.Array:
    if not dim or x.size == 0:
        return x
    return _normalize(_c2c(x, dim, forward), normalization, [x.shape[d] for d in dim])


@lowering("aten._fft_r2c.default")
def fft_r2c(x: jax.Array, dim: Sequence[int], normalization: int, onesided: bool) -> jax.Array:
    sizes = [x.shape[d] for d in dim]
    if not onesided:
        return _normalize(_c2c(_complex(x), dim, True), normalization, sizes)
    # The last dim is the halved one; the others transform what it gives.
    y = _along(cast(x, op_math(x.dtype)), FftType.RFFT, sizes[-1:], [dim[-1] % x.ndim])
    return _normalize(_c2c(y, list(dim[:-1]), True), normalization, sizes)


@lowering("aten._fft_c2r.default")
def fft_c2r(x: jax.Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> jax.Array:
    sizes = [x.shape[d] for d in dim[:-1]] + [last_dim_size]
    y = _c2c(x, list(dim[:-1]), False)
    axis = dim[-1] % x.ndim
    half = lax.slice_in_dim(y, 0, last_dim_size // 2 + 1, axis=axis)
    y = _along(half, FftType.IRFFT, [last_dim_size], [axis])
    return _normalize(y, normalization, sizes)
