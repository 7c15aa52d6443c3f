"""Fourier transforms against the CPU."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from lowering.harness import CompareLowerings, check_opinfo
from tpu_core.lowering import fft

C2C, R2C, C2R = (f"aten._fft_{kind}.default" for kind in ("c2c", "r2c", "c2r"))


@pytest.mark.parametrize(
    ("name", "ops"),
    [("fft.fft2", {C2C}), ("fft.rfft", {R2C}), ("fft.irfft2", {C2R}), ("fft.ihfft", {R2C})],
)
def test_opinfo(name: str, ops: set[str]) -> None:
    torch.manual_seed(0)
    mode = check_opinfo(name, (torch.float32, torch.complex64), samples=2, check_width=True)
    assert not mode.failures, mode.failures
    assert ops <= mode.seen


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_normalization_and_many_dims(norm: str) -> None:
    x = torch.randn(3, 4, 5, 6)
    mode = CompareLowerings(check_width=True)
    with mode:
        torch.fft.fftn(x, norm=norm)
        torch.fft.ifft2(x, norm=norm)
        y = torch.fft.rfftn(x, dim=(3, 0, 1), norm=norm)
        torch.fft.irfftn(y, dim=(3, 0, 1), norm=norm)
        torch.fft.irfft(y, n=9, norm=norm)
        torch.fft.hfft(y, norm=norm)
    assert not mode.failures, mode.failures
    assert mode.seen >= {C2C, R2C, C2R}


def test_both_sides_of_a_real_transform() -> None:
    mode = CompareLowerings()
    with mode:
        torch.ops.aten._fft_r2c(torch.randn(3, 5, dtype=torch.float64), [1, 0], 2, False)
    assert not mode.failures, mode.failures


def test_empty() -> None:
    """MKL refuses it; the result is empty."""
    x = np.zeros((0, 5), np.complex64)
    assert fft.fft_c2c(x, [1], 0, True).shape == (0, 5)


def test_single_precision_stays() -> None:
    x = jax.ShapeDtypeStruct((4, 6), np.float32)
    with jax.enable_x64(True):
        text = str(jax.make_jaxpr(lambda x: fft.fft_r2c(x, [0, 1], 1, True))(x))
    assert "f64" not in text and "c128" not in text
