"""Resampling against the CPU, and the axis maps it is made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lowering.harness import CompareLowerings
from tpu_core.lowering import resample  # noqa: F401
from tpu_core.lowering.weighted_gather import WeightedGather

MODES = {
    "nearest": ("upsample_nearest", 3),
    "nearest-exact": ("_upsample_nearest_exact", 3),
    "linear": ("upsample_linear", 1),
    "bilinear": ("upsample_bilinear", 2),
    "trilinear": ("upsample_trilinear", 3),
    "bicubic": ("upsample_bicubic", 2),
}
RANKS = {"linear": (1,), "bilinear": (2,), "trilinear": (3,), "bicubic": (2,)}
SIZES = [((4, 6, 5), (8, 12, 10)), ((5, 7, 6), (3, 10, 6)), ((1, 4, 9), (3, 1, 4))]


def _run(x: torch.Tensor, tolerance=None, **options) -> CompareLowerings:
    mode = CompareLowerings(check_width=True, tolerance=tolerance)
    x = x.clone().requires_grad_(x.is_floating_point())
    with mode:
        y = F.interpolate(x, **options)
        if x.requires_grad:
            y.backward(torch.randn_like(y))
    assert not mode.failures, mode.failures
    return mode


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, rank: int) -> None:
    torch.manual_seed(0)
    if rank not in RANKS.get(mode, (1, 2, 3)):
        with pytest.raises(NotImplementedError):
            F.interpolate(torch.zeros((1,) * (rank + 2)), size=(2,) * rank, mode=mode)
        return
    aligned = (None,) if mode.startswith("nearest") else (False, True)
    for size, outputs in SIZES:
        for align_corners in aligned:
            seen = _run(
                torch.randn(2, 3, *size[:rank]), size=outputs[:rank], mode=mode,
                align_corners=align_corners,
            ).seen  # fmt: skip
    name = f"aten.{MODES[mode][0]}{rank}d"
    assert seen >= {f"{name}.default", f"{name}_backward.default"}


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_scale_factors_that_do_not_divide(mode: str) -> None:
    x = torch.randn(1, 2, 7, 9)
    for recompute in (False, True):
        _run(x, scale_factor=(1.7, 0.6), mode=mode, recompute_scale_factor=recompute)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(3, 4), (12, 5)])
def test_antialiased(mode: str, size: tuple[int, int]) -> None:
    seen = _run(torch.randn(1, 2, 8, 11), size=size, mode=mode, antialias=True).seen
    assert f"aten._upsample_{mode}2d_aa_backward.default" in seen


@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_upsample_lanczos2d_aa"), reason="torch 2.11 has no such op"
)
def test_lanczos() -> None:
    mode = CompareLowerings()
    with mode:
        torch.ops.aten._upsample_lanczos2d_aa(torch.randn(1, 2, 8, 11), [4, 5], False)
        torch.ops.aten._upsample_lanczos2d_aa(torch.randn(1, 2, 8, 11), [13, 14], False)
    assert not mode.failures, mode.failures
    assert mode.seen


def test_other_dtypes() -> None:
    _run(torch.randn(1, 2, 5, 6, dtype=torch.float64), size=(7, 3), mode="bicubic")
    _run(torch.randint(0, 255, (1, 2, 5, 6), dtype=torch.uint8), size=(7, 3), mode="nearest")
    # The CPU computes its gradient in bfloat16.
    loose = {torch.bfloat16: (5e-2, 5e-2)}
    _run(torch.randn(1, 2, 5, 6).bfloat16(), loose, size=(7, 3), mode="bilinear")


def test_transposed_map_is_the_transpose() -> None:
    rng = np.random.default_rng(0)
    index = rng.integers(0, 5, (7, 3))
    weight = rng.normal(size=(7, 3)) * (rng.random((7, 3)) > 0.3)

    def dense(m: WeightedGather) -> np.ndarray:
        matrix = np.zeros((len(m.index), m.size))
        for i, (row, weights) in enumerate(zip(m.index, m.weight)):
            np.add.at(matrix[i], row, weights)
        return matrix

    m = WeightedGather(index, weight, 5)
    np.testing.assert_allclose(dense(m.transpose()), dense(m).T)
