"""Fourier transforms whose length varies, as products with matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import FftType

from tpu_core.padding.fourier import _circle, _product

KINDS: dict[FftType, Callable[..., Any]] = {
    FftType.FFT: lambda x, n: np.fft.fft(x),
    FftType.IFFT: lambda x, n: np.fft.ifft(x),
    FftType.RFFT: lambda x, n: np.fft.rfft(x),
    FftType.IRFFT: lambda x, n: np.fft.irfft(x, n),
}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 64, 601, 1536, 2048])
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: FftType, n: int) -> None:
    """As close to the sum as a fast transform in the same precision."""
    random = np.random.default_rng(n)
    half = n // 2 + 1
    given, made = {FftType.RFFT: (n, half), FftType.IRFFT: (half, n)}.get(kind, (n, n))
    x = random.standard_normal((3, given)).astype(np.float32)
    if kind != FftType.RFFT:
        x = (x + 1j * random.standard_normal((3, given))).astype(np.complex64)
    expected = KINDS[kind](x, n)
    padded = np.pad(x, ((0, 0), (0, 5)))
    found = jax.jit(_product, static_argnums=(1, 3))(padded, kind, np.int32(n), made + 3)
    error = np.linalg.norm(found[:, :made] - expected) / np.linalg.norm(expected)
    assert error < 5e-7


def test_quarters_are_exact() -> None:
    n = np.int32(12)
    cos, sin = _circle(jnp.arange(12, dtype=np.int32), n, np.dtype(np.float32))
    assert cos[::3].tolist() == [1, 0, -1, 0] and sin[::3].tolist() == [0, 1, 0, -1]
    angle = np.arange(12) * np.pi / 6
    np.testing.assert_allclose(cos, np.cos(angle), atol=1e-7)
    np.testing.assert_allclose(sin, np.sin(angle), atol=1e-7)
