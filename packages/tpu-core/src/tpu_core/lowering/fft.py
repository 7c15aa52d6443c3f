"""Fourier transforms with PyTorch's normalization modes (``fft_norm_mode``, SpectralOpsUtils.h)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.registry import lowering


def _normalize(x: jax.Array, mode: int, sizes: Sequence[int]) -> jax.Array:
    """Mode 0 scales by nothing, 1 by ``1 / sqrt(n)``, 2 by ``1 / n``."""
    n = math.prod(sizes)
    if mode == 0 or n <= 1:
        return x
    scale = 1.0 / math.sqrt(n) if mode == 1 else 1.0 / n
    return x * jnp.asarray(scale, np.zeros((), x.dtype).real.dtype)


def _complex(x: jax.Array) -> jax.Array:
    """Complex with a real counterpart wide enough for ``x``."""
    real = op_math(x.dtype)
    return cast(x, {"float32": np.complex64, "float64": np.complex128}.get(real.name, real))


def _c2c(x: jax.Array, dims: Sequence[int], forward: bool) -> jax.Array:
    """Unnormalized; at most three dims at a time is what XLA transforms."""
    transform: Any = jnp.fft.fftn if forward else jnp.fft.ifftn
    for start in range(0, len(dims), 3):
        axes = tuple(d % x.ndim for d in dims[start : start + 3])
        x = transform(x, axes=axes, norm="backward" if forward else "forward")
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
    y = jnp.fft.rfft(cast(x, op_math(x.dtype)), axis=dim[-1] % x.ndim)
    return _normalize(_c2c(y, list(dim[:-1]), True), normalization, sizes)


@lowering("aten._fft_c2r.default")
def fft_c2r(x: jax.Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> jax.Array:
    sizes = [x.shape[d] for d in dim[:-1]] + [last_dim_size]
    y = _c2c(x, list(dim[:-1]), False)
    y = jnp.fft.irfft(y, n=last_dim_size, axis=dim[-1] % x.ndim, norm="forward")
    return _normalize(y, normalization, sizes)
