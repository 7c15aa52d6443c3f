"""Fused optimizer steps and the gradient scaler's ops against the CPU, and against formulas."""

from __future__ import annotations

import math

import pytest
import torch

from tpu_core import lowering

from .harness import CompareLowerings

lowering.load()

aten = torch.ops.aten


def state(dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    shapes = [(4, 3), (5,), ()]
    lists = [[torch.randn(s).to(dtype) for s in shapes] for _ in range(2)]
    return lists + [[torch.rand(s).to(dtype) for s in shapes] for _ in range(3)]


def steps(n: float) -> list[torch.Tensor]:
    return [torch.tensor(float(n)) for _ in range(3)]


def compare(op, *args, **kwargs) -> None:
    mode = CompareLowerings(check_width=True)
    with mode:
        op(*args, **kwargs)
    assert not mode.failures
    assert str(op) in mode.seen


SCALING = [
    {},
    {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(0.0)},
    {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(1.0)},
]
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


@pytest.mark.parametrize("scaling", SCALING, ids=["plain", "scaled", "overflow"])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("name", ["_fused_adam", "_fused_adamw"])
def test_adam(name: str, amsgrad: bool, scaling: dict) -> None:
    params, grads, averages, squares, largest = state()
    lists = (params, grads, averages, squares, largest if amsgrad else [])
    op = getattr(aten, name)
    for step, decay, maximize in ((1, 0.0, False), (1000, 0.1, True)):
        options = {**ADAM, "weight_decay": decay, "amsgrad": amsgrad, "maximize": maximize}
        compare(op.default, *lists, steps(step), lr=1e-2, **options, **scaling)
    rate = torch.tensor(1e-2)
    compare(op.tensor_lr, *lists, steps(3), lr=rate, **options, **scaling)


def test_adam_in_bfloat16_and_float64() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        params, grads, averages, squares, _ = state(dtype)
        options = {**ADAM, "weight_decay": 0.1, "amsgrad": False, "maximize": False}
        lists = (params, grads, averages, squares, [])
        compare(aten._fused_adam.default, *lists, steps(2), lr=1e-2, **options)


@pytest.mark.parametrize("scaling", SCALING, ids=["plain", "scaled", "overflow"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_sgd(first: bool, nesterov: bool, scaling: dict) -> None:
    params, grads, buffers, _, _ = state()
    options = {
        "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0 if nesterov else 0.2,
        "nesterov": nesterov, "maximize": first, "is_first_step": first,
    }  # fmt: skip
    compare(aten._fused_sgd.default, params, grads, buffers, lr=0.1, **options, **scaling)
    rate = torch.tensor(0.1)
    compare(aten._fused_sgd.tensor_lr, params, grads, buffers, lr=rate, **options, **scaling)


def test_sgd_without_momentum() -> None:
    params, grads, *_ = state()
    options = {
        "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False,
        "maximize": False, "is_first_step": False,
    }  # fmt: skip
    compare(aten._fused_sgd.default, params, grads, [], lr=0.1, **options)


@pytest.mark.parametrize("scaling", SCALING, ids=["plain", "scaled", "overflow"])
def test_adagrad(scaling: dict) -> None:
    params, grads, _, sums, _ = state()
    options = {"lr_decay": 0.01, "weight_decay": 0.1, "eps": 1e-10, "maximize": False}
    lists = (params, grads, sums, steps(7))
    compare(aten._fused_adagrad.default, *lists, lr=0.1, **options, **scaling)
    compare(aten._fused_adagrad.tensor_lr, *lists, lr=torch.tensor(0.1), **options, **scaling)


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unscale(dtype: torch.dtype, bad: float | None) -> None:
    grads = [torch.randn(4).to(dtype), torch.randn(2, 3).to(dtype)]
    if bad is not None:
        grads[1][0, 1] = bad
    op = aten._amp_foreach_non_finite_check_and_unscale.default
    compare(op, grads, torch.tensor([0.0]), torch.tensor([0.25]))


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("successes", [3, 1998, 1999])
@pytest.mark.parametrize("scale", [65536.0, 3e38])
def test_update_scale(scale: float, successes: int, found: float) -> None:
    tensors = (torch.tensor([scale]), torch.tensor([successes], dtype=torch.int32))
    compare(aten._amp_update_scale.default, *tensors, torch.tensor([found]), 2.0, 0.5, 2000)
