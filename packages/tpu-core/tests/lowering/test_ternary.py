"""Selection, clamping, interpolation and fused multiply-adds against the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from tpu_core import lowering

from .harness import CompareLowerings, check_opinfo

lowering.load()

OPS = {
    "where": "where.self",
    "masked_fill": "masked_fill.Scalar masked_fill.Tensor",
    "clamp": "clamp.Tensor",
    "clamp_min": "clamp_min.Tensor",
    "clamp_max": "clamp_max.Tensor",
    "lerp": "lerp.Scalar",
    "addcmul": "addcmul.default",
    "addcdiv": "addcdiv.default",
}
OTHERS = (torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("name", OPS)
def test_opinfo(name: str) -> None:
    mode = check_opinfo(name, samples=4, check_width=True)
    assert not mode.failures
    assert {f"aten.{op}" for op in OPS[name].split()} <= mode.seen
    options = {"samples": 2, "grad": False, "check_width": True}
    assert not check_opinfo(name, dtypes=OTHERS, **options).failures


def compare(fn, *args) -> set[str]:
    mode = CompareLowerings(check_width=True)
    with mode:
        fn(*args)
    assert not mode.failures
    return mode.seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_clamp(dtype: torch.dtype) -> None:
    x = torch.tensor([-3, -1, 0, 1, 3]).to(dtype)
    seen = compare(lambda: (x.clamp(-1, 2), x.clamp(min=0), x.clamp(max=0), x.clamp(2, -2)))
    assert "aten.clamp.default" in seen
    seen = compare(lambda: (x.clamp_min(1), x.clamp_max(0.5), x.clamp(max=x.flip(0))))
    assert {"aten.clamp_min.default", "aten.clamp_max.default"} <= seen


def test_clamp_keeps_nan() -> None:
    x = torch.tensor([math.nan, 1.0, math.inf, -math.inf])
    compare(lambda: (x.clamp(-1, 1), x.clamp_min(0.0), torch.clamp(x, x, x.flip(0))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_lerp(dtype: torch.dtype) -> None:
    a, b, w = (torch.randn(4, 5).to(dtype) for _ in range(3))
    assert compare(torch.lerp, a, b, w) == {"aten.lerp.Tensor"}
    for weight in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert compare(torch.lerp, a, b, weight) == {"aten.lerp.Scalar"}


def test_values_of_fused_multiply_adds() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        a, b, c = (torch.rand(4).to(dtype) + 1 for _ in range(3))
        compare(lambda *t: (torch.addcmul(*t, value=0.3), torch.addcdiv(*t, value=-0.3)), a, b, c)
    x = torch.arange(4)
    compare(lambda: (torch.addcmul(x, x, x), torch.addcmul(x, x, x, value=3)))


def test_masked_fill_keeps_the_dtype() -> None:
    x, mask = torch.arange(6).reshape(2, 3), torch.tensor([True, False, True])
    compare(lambda: (x.masked_fill(mask, 7), x.masked_fill(mask, torch.tensor(7))))
    compare(lambda: x.bfloat16().masked_fill(mask, -math.inf))
    compare(lambda: torch.where(mask, x, 0.5))
