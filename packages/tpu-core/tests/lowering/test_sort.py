"""Sorting, selection and search against the CPU."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest
import torch

from tpu_core.lowering import search, sort  # noqa: F401
from tpu_core.lowering.evaluate import call_lowering, to_jax, to_torch
from tpu_core.lowering.registry import REGISTRY

from .harness import CompareLowerings, _aval, check_opinfo

NAN, INF = math.nan, math.inf


# Of equal elements the CPU's unstable kernels give any index: only floats without ties here,
# integers and 16-bit floats by value below.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sort", {"sort.default", "sort.stable"}),
        ("topk", {"topk.default"}),
        ("kthvalue", {"kthvalue.default"}),
        ("median", {"median.default", "median.dim"}),
        ("nanmedian", {"nanmedian.default", "nanmedian.dim"}),
        ("mode", {"mode.default"}),
        ("searchsorted", {"searchsorted.Tensor"}),
        ("bucketize", {"bucketize.Tensor"}),
        ("histc", {"histc.default"}),
    ],
)
def test_opinfo(name: str, expected: set[str]) -> None:
    torch.manual_seed(0)
    mode = check_opinfo(name, samples=6, check_width=True)
    assert not mode.failures, "\n".join(mode.failures)
    assert {f"aten.{o}" for o in expected} <= mode.seen


def _lower(op: str, args: tuple[Any, ...], expected: Any, **kwargs: Any) -> list[torch.Tensor]:
    out = tuple(_aval(t) for t in expected)
    with jax.enable_x64(True):
        args = tuple(to_jax(a) if isinstance(a, torch.Tensor) else a for a in args)
        return [to_torch(r) for r in call_lowering(REGISTRY.get(op), args, kwargs, out)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("largest", [True, False])
def test_topk_with_ties_by_value(dtype: torch.dtype, largest: bool) -> None:
    x = torch.randint(0, 6, (3, 20), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.topk(x, 7, 1, largest)
    values, index = _lower("aten.topk.default", (x, 7, 1, largest), expected)
    torch.testing.assert_close(values, expected.values)
    torch.testing.assert_close(x.gather(1, index), values)
    assert all(len(set(row)) == 7 for row in index.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("largest", [True, False])
def test_nan_is_greater_than_infinity(dtype: torch.dtype, largest: bool) -> None:
    x = torch.tensor([1.0, NAN, -INF, INF, 0.5, -2.0], dtype=dtype)
    with CompareLowerings() as mode:
        for k in (1, 3, 6):
            torch.topk(x, k, largest=largest)
        torch.sort(x, descending=largest)
    assert not mode.failures, "\n".join(mode.failures)


def test_extremes_of_integers() -> None:
    x = torch.tensor([0, torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max, -1])
    with CompareLowerings() as mode:
        torch.topk(x, 3)
        torch.topk(x, 3, largest=False)
        torch.sort(x, descending=True)
    assert not mode.failures, "\n".join(mode.failures)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_sort_is_stable(descending: bool, dtype: torch.dtype) -> None:
    x = torch.tensor([[2, 0, 1, 0, 2, 2, 1, 0]] * 2).to(dtype)
    with CompareLowerings() as mode:
        torch.sort(x, stable=True, dim=1, descending=descending)
        torch.argsort(torch.tensor([0.0, -0.0, -0.0, 0.0]), stable=True, descending=descending)
    assert not mode.failures, "\n".join(mode.failures)
    assert mode.seen >= {"aten.sort.stable"}


def test_medians_of_nan_take_its_first_index() -> None:
    x = torch.tensor([[1.0, NAN, 3.0, NAN, 2.0], [5.0, 4.0, 3.0, 2.0, 1.0], [NAN] * 5])
    with CompareLowerings() as mode:
        torch.median(x[:2], 1)
        torch.nanmedian(x[:2], 1, keepdim=True)
        torch.median(x)
        torch.nanmedian(x)
        torch.nanmedian(x[2])
        torch.median(torch.tensor([3, 1, 2, 4]))
    assert not mode.failures, "\n".join(mode.failures)
    assert len(mode.seen) == 4


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_mode_takes_the_least_of_the_most_frequent(dtype: torch.dtype) -> None:
    x = torch.tensor([[3, 1, 3, 1, 2], [5, 5, 5, 0, 0], [4, 3, 2, 1, 0]]).to(dtype)
    with CompareLowerings() as mode:
        torch.mode(x, 1)
        torch.mode(x, 0, keepdim=True)
    assert not mode.failures, "\n".join(mode.failures)


def test_zero_dimensional_and_empty() -> None:
    x, empty = torch.tensor(2.0), torch.zeros(0, 3)
    with CompareLowerings() as mode:
        for t, dim in ((x, 0), (x, -1), (empty, 1)):
            torch.sort(t, dim)
            torch.topk(t, 1, dim)
            torch.topk(t, 0 if t.dim() else 1, dim)
            torch.kthvalue(t, 1, dim)
            torch.median(t, dim)
            torch.nanmedian(t, dim)
        torch.mode(x)
        torch.sort(empty, 0)
        torch.median(torch.zeros(0))
    assert not mode.failures, "\n".join(mode.failures)


@pytest.mark.parametrize("count", [0, 1, 5, 128, 129, 1000])
@pytest.mark.parametrize("right", [False, True])
def test_search_by_comparison_and_by_bisection(count: int, right: bool) -> None:
    torch.manual_seed(0)
    bounds = torch.randint(0, 300, (count,)).float().sort().values
    values = torch.cat([bounds[:7], torch.tensor([-1.0, 1e9, 150.5, NAN, INF, -INF])])
    with CompareLowerings(check_width=True) as mode:
        torch.searchsorted(bounds, values.view(1, -1), right=right)
        torch.searchsorted(bounds, 17.0, side="right" if right else "left")
        torch.bucketize(values, bounds, right=right, out_int32=True)
        torch.bucketize(3, bounds, right=right)
    assert not mode.failures, "\n".join(mode.failures)
    assert len(mode.seen) == 4


@pytest.mark.parametrize("count", [6, 200])
def test_search_in_rows_with_a_sorter(count: int) -> None:
    torch.manual_seed(0)
    rows, values = torch.rand(3, count), torch.rand(3, 4)
    with CompareLowerings() as mode:
        torch.searchsorted(rows, values, sorter=rows.argsort(1))
        torch.searchsorted(rows.sort(1).values, values, right=True)
    assert not mode.failures, "\n".join(mode.failures)


def test_histogram_ranges() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 2.0, 3.0, 4.0, 10.0, -1.0])
    with CompareLowerings() as mode:
        torch.histc(x, 4, 0, 4)
        torch.histc(x, 3)
        torch.histc(torch.full((5,), 2.0), 4)
        torch.histc(torch.zeros(0), 4, 0, 1)
    assert not mode.failures, "\n".join(mode.failures)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_searches_among_boundaries_with_nan(right, count):
    nan = float("nan")
    bounds = torch.cat([torch.arange(4.0), torch.full((count,), nan)])
    values = torch.tensor([-1.0, 0.0, 0.5, 2.0, 3.0, 9.0, nan])
    for find in (
        lambda b, v: torch.searchsorted(b, v, right=right),
        lambda b, v: torch.bucketize(v, b, right=right),
        lambda b, v: torch.searchsorted(b.expand(2, -1), v.expand(2, -1), right=right),
    ):
        got = find(bounds.to("tpu"), values.to("tpu"))
        torch.testing.assert_close(got.cpu(), find(bounds, values))
