"""Padding and its gradients against the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lowering.harness import CompareLowerings, check_opinfo
from tpu_core.lowering import padding  # noqa: F401

CASES = {
    "reflect": [((2, 3, 5), (2, 3)), ((3, 5), (4, 0)), ((1, 2, 4, 5), (1, 2, 3, 0)),
                ((1, 1, 3, 4, 5), (1, 2, 2, 1, 0, 2))],
    "replicate": [((2, 3, 5), (2, 3)), ((2, 3, 5), (-2, 3)), ((1, 2, 4, 5), (1, 7, 3, 0)),
                  ((1, 1, 3, 4, 5), (1, 2, 2, 1, 0, 2))],
    "constant": [((2, 3), (1, 2, 0, 3)), ((4, 5), (-1, -2)), ((3,), (-1, 2)), ((0, 3), (1, 1))],
}  # fmt: skip


@pytest.mark.parametrize("mode", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_padding(mode: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    compare = CompareLowerings(check_width=True)
    for shape, pad in CASES[mode]:
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        with compare:
            y = F.pad(x, pad, mode) if mode != "constant" else torch.constant_pad_nd(x, pad, 2.5)
            y.backward(torch.randn_like(y))
    assert not compare.failures, compare.failures
    if mode == "constant":
        assert "aten.constant_pad_nd.default" in compare.seen
    else:
        name = "reflection_pad" if mode == "reflect" else "replication_pad"
        for rank in (1, 2, 3):
            assert f"aten.{name}{rank}d.default" in compare.seen
            assert f"aten.{name}{rank}d_backward.default" in compare.seen


def test_opinfo_constant() -> None:
    mode = check_opinfo("constant_pad_nd", (torch.float32, torch.int64, torch.bool), 3)
    assert not mode.failures, mode.failures
