"""Cumulative ops against the CPU."""

from __future__ import annotations

import math
import time

import jax
import numpy as np
import pytest
import torch

from tpu_core.lowering import scan  # noqa: F401
from tpu_core.lowering.evaluate import call_lowering
from tpu_core.lowering.registry import REGISTRY

from .harness import CompareLowerings, check_opinfo

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("cumsum", (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)),
        ("cumprod", (torch.float32, torch.int64)),
        ("logcumsumexp", (torch.float32, torch.bfloat16, torch.complex64)),
        ("cummax", (torch.float32, torch.int64, torch.bool)),
        ("cummin", (torch.float32, torch.int64, torch.bool)),
    ],
)
def test_opinfo(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    torch.manual_seed(0)
    mode = check_opinfo(name, dtypes=dtypes, samples=3, check_width=True)
    assert not mode.failures, "\n".join(mode.failures)
    assert f"aten.{name}.default" in mode.seen


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 1.0, -INF, 3.0, NAN, 2.0, NAN, INF, 1.0],
        [-INF, -INF, 1.0, INF, 2.0, -INF],
        [100.0, -100.0, 100.0, 100.0],
    ],
)
def test_infinities_nan_and_ties(values: list[float]) -> None:
    x = torch.tensor(values)
    with CompareLowerings() as mode:
        for f in (torch.cummax, torch.cummin, torch.logcumsumexp):
            f(x, 0)
    assert not mode.failures, "\n".join(mode.failures)
    assert len(mode.seen) == 3


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_logs_of_complex_sums_at_infinity(dtype: torch.dtype) -> None:
    reals, imaginary = [-INF, -2.0, 0.0, 1.5, INF, NAN], [0.0, 1.0, -2.0, INF, NAN]
    z = torch.tensor([complex(a, b) for a in reals for b in imaginary], dtype=dtype)
    x, y = z.repeat_interleave(len(z)), z.repeat(len(z))
    with CompareLowerings() as mode:
        torch.logaddexp(x, y)
        torch.logcumsumexp(torch.stack([x, y], 1), 1)
    assert not mode.failures, "\n".join(mode.failures)
    assert {"aten.logaddexp.default", "aten.logcumsumexp.default"} <= mode.seen


def test_empty_and_zero_dimensional() -> None:
    with CompareLowerings() as mode:
        for f in (torch.cumsum, torch.cumprod, torch.cummax, torch.cummin, torch.logcumsumexp):
            f(torch.tensor(2.0), 0)
            f(torch.zeros(0, 3), 0)
            f(torch.zeros(0, 3), -1)
    assert not mode.failures, "\n".join(mode.failures)


def test_dtype_is_applied_before_the_sum() -> None:
    with CompareLowerings() as mode:
        torch.cumsum(torch.full((4,), 100, dtype=torch.int8), 0)
        torch.cumsum(torch.full((4,), 100, dtype=torch.int8), 0, dtype=torch.int8)
        torch.cumsum(torch.full((300,), 1.5, dtype=torch.bfloat16), 0)
        torch.cumprod(torch.full((4,), 2), 0, dtype=torch.float32)
    assert not mode.failures, "\n".join(mode.failures)


@pytest.mark.parametrize("name", ["cumsum", "cummax", "logcumsumexp"])
def test_time_is_not_quadratic(name: str) -> None:
    n = 200_000
    out = (jax.ShapeDtypeStruct((n,), np.float32), jax.ShapeDtypeStruct((n,), np.int64))
    with jax.enable_x64(True):
        x = jax.numpy.ones((n,), np.float32)
        results = 2 if name == "cummax" else 1
        entry = REGISTRY.get(f"aten.{name}.default")
        call = jax.jit(lambda x: call_lowering(entry, (x, 0), {}, out[:results]))
        jax.block_until_ready(call(x))
        start = time.process_time()
        jax.block_until_ready(call(x))
    # n^2 steps take more than ten seconds.
    assert time.process_time() - start < 2
