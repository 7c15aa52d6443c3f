"""Reductions against the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from tpu_core.lowering import reduction, scan  # noqa: F401

from .harness import CompareLowerings, check_opinfo

F32, BF16, I64, BOOL, C64 = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
)
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "dtypes", "expected"),
    [
        ("sum", (F32, BF16, I64, BOOL, C64), {"sum.default", "sum.dim_IntList"}),
        ("nansum", (F32, I64), {"nansum.default"}),
        ("mean", (F32, BF16), {"mean.default", "mean.dim"}),
        ("prod", (F32, I64, BOOL), {"prod.default", "prod.dim_int"}),
        ("trace", (F32, I64), {"trace.default"}),
        ("amax", (F32, BF16, I64, BOOL), {"amax.default"}),
        ("amin", (F32, I64, BOOL), {"amin.default"}),
        ("max", (F32, BF16, I64, BOOL), {"max.default", "max.dim"}),
        ("min", (F32, I64, BOOL), {"min.default", "min.dim"}),
        ("aminmax", (F32, I64), {"aminmax.default"}),
        ("argmax", (F32, BF16, I64), {"argmax.default"}),
        ("argmin", (F32, I64), {"argmin.default"}),
        ("any", (F32, BOOL, torch.uint8), {"any.default", "any.dim", "any.dims"}),
        ("all", (F32, BOOL, torch.uint8), {"all.default", "all.dim", "all.dims"}),
        ("count_nonzero", (F32, I64), {"count_nonzero.default", "count_nonzero.dim_IntList"}),
        ("var", (F32, BF16, C64), {"var.correction"}),
        ("std", (F32,), {"std.correction"}),
        ("var_mean", (F32,), {"var_mean.correction"}),
        ("std_mean", (F32,), {"std_mean.correction"}),
        ("linalg.vector_norm", (F32, BF16, C64), {"linalg_vector_norm.default"}),
        ("dist", (F32,), {"dist.default"}),
        ("logsumexp", (F32, BF16, I64, C64), {"logsumexp.default"}),
    ],
)
def test_opinfo(name: str, dtypes: tuple[torch.dtype, ...], expected: set[str]) -> None:
    torch.manual_seed(0)
    mode = check_opinfo(name, dtypes=dtypes, samples=4, check_width=True)
    assert not mode.failures, "\n".join(mode.failures)
    assert {f"aten.{o}" for o in expected} <= mode.seen


def _check(call, **options) -> CompareLowerings:
    with CompareLowerings(**options) as mode:
        call()
    assert not mode.failures, "\n".join(mode.failures)
    assert mode.seen
    return mode


@pytest.mark.parametrize(
    "values", [[1.0, NAN, 3.0, NAN], [2.0, 5.0, 5.0, 1.0], [INF, -INF, INF, 0.0]]
)
def test_extrema_propagate_nan_and_take_the_first_index(values: list[float]) -> None:
    x = torch.tensor([values, values[::-1]])

    def run() -> None:
        for f in (torch.max, torch.min, torch.argmax, torch.argmin):
            f(x)
            f(x, 1)
            f(x.bfloat16(), 0, keepdim=True)

    _check(run)


def test_zero_dimensional_tensors() -> None:
    x = torch.tensor(3.0)

    def run() -> None:
        for f in (torch.sum, torch.mean, torch.prod, torch.amax, torch.amin, torch.max, torch.min,
                  torch.argmax, torch.argmin, torch.any, torch.all, torch.logsumexp):  # fmt: skip
            for dim in (0, -1):
                f(x, dim)
        torch.aminmax(x)
        torch.linalg.vector_norm(x, dim=-1)
        torch.var(x, dim=0, correction=0)
        torch.count_nonzero(x)

    _check(run)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_empty_tensors() -> None:
    x = torch.zeros(0, 3)

    def run() -> None:
        for f in (torch.sum, torch.mean, torch.prod, torch.any, torch.all, torch.nansum):
            f(x)
            f(x, 0)
            f(x, 1)
        torch.logsumexp(x, 0)
        torch.logsumexp(x, 1)
        torch.linalg.vector_norm(x)
        torch.count_nonzero(x, dim=0)
        x.amax(1)
        x.argmax(1)
        torch.var_mean(torch.zeros(2, 0), 1)

    _check(run)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_degrees_of_freedom() -> None:
    x = torch.tensor([[1.0, 2.0, 4.0]])
    _check(lambda: [torch.var(x, 1, correction=c) for c in (0, 1, 2.5, 3, 5)])
    _check(lambda: torch.std_mean(x, 0))


def test_variance_does_not_cancel() -> None:
    x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)) + 1e4
    _check(lambda: torch.var(x, 1), tolerance={torch.float32: (1e-4, 0)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operands_are_rounded_before_a_narrow_reduction(dtype: torch.dtype) -> None:
    """As documented: ``dtype=`` casts the input before the op is performed."""
    x = torch.tensor([1.001, -1.0, 0.5004, -0.5, 0.25013])
    with CompareLowerings() as mode:
        x.sum(dtype=dtype)
        x[None].sum(1, dtype=dtype)
        x.nansum(dtype=dtype)
        x.prod(dtype=dtype)
        x.cumsum(0, dtype=dtype)
        x.cumprod(0, dtype=dtype)
    assert not mode.failures, "\n".join(mode.failures)
    assert len(mode.seen) >= 6


def test_any_and_all_over_no_dims_reduce_nothing() -> None:
    x = torch.tensor([[0.0, 2.0]])
    for t in (x, x.to(torch.uint8)):
        mode = _check(lambda t=t: (torch.any(t, dim=()), torch.all(t, dim=())))
        assert "aten.any.dims" in mode.seen


def test_narrow_integers_and_floats_accumulate_wide() -> None:
    _check(lambda: torch.full((1000,), 100, dtype=torch.int8).sum())
    _check(lambda: torch.full((5000,), 1.0, dtype=torch.bfloat16).sum())
    _check(lambda: torch.full((5000,), 300.0, dtype=torch.float16).mean())
    _check(lambda: torch.full((1000,), 100, dtype=torch.uint8).sum(dtype=torch.uint8))
    _check(lambda: torch.ones(7, dtype=torch.bool).mean(dtype=torch.float32))


@pytest.mark.parametrize("p", [0, 1, 2, 3, 0.5, -1, INF, -INF])
def test_norms(p: float) -> None:
    x = torch.tensor([[1.0, -2.0, 3.0], [0.5, -0.25, NAN]])
    half = x.bfloat16()

    def run() -> None:
        torch.linalg.vector_norm(x, p)
        torch.linalg.vector_norm(x, p, 1, keepdim=True)
        torch.linalg.vector_norm(half, p, 0, dtype=torch.float32)
        torch.ops.aten.norm.Scalar(x, p)
        torch.ops.aten.norm.ScalarOpt_dim(x, p, [1], True)
        torch.ops.aten.norm.ScalarOpt_dtype(x, p, dtype=torch.float64)
        torch.ops.aten.norm.ScalarOpt_dim_dtype(x, p, [0], False, dtype=torch.float64)

    assert len(_check(run).seen) == 5


def test_norm_without_an_order() -> None:
    _check(lambda: torch.ops.aten.norm.ScalarOpt_dim(torch.ones(3), None, [0], False))


def test_logsumexp_of_infinities() -> None:
    rows = [[INF, -INF], [-INF, -INF], [NAN, 1.0], [1000.0, 1000.0]]
    _check(lambda: torch.logsumexp(torch.tensor(rows), 1))


def test_nansum_over_no_dims_is_over_all() -> None:
    x = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
    for options in ({"dim": ()}, {"dim": (), "keepdim": True}, {"dim": 1}, {}):
        torch.testing.assert_close(x.to("tpu").nansum(**options).cpu(), x.nansum(**options))
        torch.testing.assert_close(x.to("tpu").nanmean(**options).cpu(), x.nanmean(**options))
