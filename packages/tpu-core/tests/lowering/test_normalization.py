"""Layer, group, batch and RMS normalisation against the CPU."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch
from torch._decomp import decomposition_table

from tpu_core.lowering import batch_norm, normalization  # noqa: F401
from tpu_core.lowering.evaluate import call_lowering, to_jax, to_torch
from tpu_core.lowering.registry import REGISTRY

from .harness import CompareLowerings, _aval, check_opinfo

aten = torch.ops.aten
TOLERANCE = {
    # One element a row: rstd is 316, which magnifies the CPU's rounding of terms that cancel.
    torch.float32: (1.3e-6, 1e-4),
    # Each of the CPU's threads rounds its part of a sum to bfloat16.
    torch.bfloat16: (1.6e-2, 5e-3),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("native_layer_norm", {"native_layer_norm", "native_layer_norm_backward"}),
        ("nn.functional.layer_norm", {"native_layer_norm", "native_layer_norm_backward"}),
        ("nn.functional.group_norm", {"native_group_norm", "native_group_norm_backward"}),
        ("nn.functional.batch_norm", {"native_batch_norm_backward"}),
        ("nn.functional.instance_norm", {"native_batch_norm_backward"}),
        ("renorm", {"renorm"}),
    ],
)
def test_opinfo(name: str, expected: set[str]) -> None:
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16)
    mode = check_opinfo(name, dtypes=dtypes, samples=4, check_width=True, tolerance=TOLERANCE)
    assert not mode.failures, "\n".join(mode.failures)
    assert {f"aten.{o}.default" for o in expected} <= mode.seen


def _lower(op: str, args: tuple[Any, ...], expected: tuple[Any, ...]) -> list[Any]:
    """Results of the lowering of ``op`` for CPU tensors, in the avals of ``expected``."""
    out = tuple(_aval(t) for t in expected)
    with jax.enable_x64(True):
        args = tuple(to_jax(a) if isinstance(a, torch.Tensor) else a for a in args)
        results = call_lowering(REGISTRY.get(op), args, {}, out)
    return [None if r is None else to_torch(r) for r in results]


def _check(op: str, args: tuple[Any, ...], expected: tuple[Any, ...], **tolerance: float) -> None:
    for got, want in zip(_lower(op, args, expected), expected, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, equal_nan=True, **tolerance)


def _batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = (torch.randn(4, 3, 5, 2) * 3 + 1).to(dtype)
    return x, *(torch.rand(3) + 0.5 for _ in range(4))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functional_batch_norm(training: bool, dtype: torch.dtype) -> None:
    args = (*_batch(dtype), training, 0.1, 1e-5)
    with CompareLowerings(check_width=True) as mode:
        aten._native_batch_norm_legit_functional(*args)
        aten._batch_norm_with_update_functional(*args[:5], *args[6:])
        aten._batch_norm_no_update(*args[:5], *args[6:])
        aten._native_batch_norm_legit_no_training(*args[:5], *args[6:])
        # ATen's own CPU kernel crashes here with training=False.
        aten._native_batch_norm_legit.no_stats(*args[:3], True, 0.1, 1e-5)
    assert not mode.failures, "\n".join(mode.failures)
    assert len(mode.seen) == 5


def test_batch_norm_in_evaluation_saves_what_the_meta_function_says() -> None:
    """Off the CPU, evaluation mode saves the mean and rstd that it used."""
    x, w, b, mean, var = _batch()
    expected = (
        torch.nn.functional.batch_norm(x, mean, var, w, b, training=False),
        mean,
        torch.rsqrt(var + 1e-5),
        mean,
        var,
    )
    args = (x, w, b, mean, var, False, 0.1, 1e-5)
    _check("aten._native_batch_norm_legit_functional.default", args, expected)


def test_batch_norm_of_one_value_a_channel() -> None:
    one = torch.ones(3)
    with CompareLowerings(tolerance=TOLERANCE) as mode:
        aten._native_batch_norm_legit_functional(
            torch.randn(1, 3), None, None, one, one.clone(), True, 0.1, 1e-5
        )
    assert not mode.failures, "\n".join(mode.failures)


@pytest.mark.parametrize("mask", [[True, False, True], [False, True, False]])
def test_masked_outputs_are_none(mask: list[bool]) -> None:
    x, w, b, mean, var = _batch()
    grad = torch.randn_like(x)
    row = x.mean(-1, keepdim=True), x.var(-1, keepdim=True).rsqrt()
    group = x.mean((2, 3)), x.var((2, 3)).rsqrt()
    saved = x.mean((0, 2, 3)), var.rsqrt()
    with CompareLowerings() as mode:
        for train in (True, False):
            aten.native_batch_norm_backward(grad, x, w, mean, var, *saved, train, 1e-5, mask)
        aten.native_layer_norm_backward(grad, x, [2], *row, w[:2], b[:2], mask)
        aten.native_group_norm_backward(grad, x, *group, w, 4, 3, 10, 3, mask)
    assert not mode.failures, "\n".join(mode.failures)
    assert len(mode.seen) == 3


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(weighted: bool, eps: float | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, grad = (torch.randn(4, 3, 6).to(dtype) for _ in range(2))
    weight = torch.randn(3, 6).to(dtype) if weighted else None
    expected = aten._fused_rms_norm(x, [3, 6], weight, eps)
    _check("aten._fused_rms_norm.default", (x, [3, 6], weight, eps), expected)
    # The CPU has no kernel of the backward op.
    backward = decomposition_table[aten._fused_rms_norm_backward.default]
    mask = [True, weighted]
    args = (grad, x, [3, 6], expected[1], weight, mask)
    _check("aten._fused_rms_norm_backward.default", args, backward(*args))


def test_a_kernel_for_rms_norm_keeps_its_gradient() -> None:
    """Its derivative formula outranks the composite kernel once the backend has one."""
    kernel = torch._C._dispatch_dump("aten::_fused_rms_norm")
    assert "Autograd[alias]" in kernel and "CompositeImplicitAutograd[alias]" in kernel
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm", lambda *a: None, "PrivateUse1")
        table = torch._C._dispatch_dump_table("aten::_fused_rms_norm")
    (row,) = (r for r in table.splitlines() if r.startswith("AutogradPrivateUse1:"))
    assert "VariableType" in row


def test_layer_norm_of_mixed_dtypes() -> None:
    x, weight = torch.randn(3, 4, dtype=torch.bfloat16), torch.rand(4)
    with CompareLowerings() as mode:
        torch.nn.functional.layer_norm(x, [4], weight, weight)
        torch.nn.functional.layer_norm(torch.zeros(0, 4), [4])
    assert not mode.failures, "\n".join(mode.failures)


def test_synchronized_batch_norm_of_parts_is_that_of_the_whole() -> None:
    x, w, b, running_mean, running_var = (t.requires_grad_(t.dim() == 4) for t in _batch())
    w.requires_grad_()
    b.requires_grad_()
    new_mean, new_var = running_mean.clone(), running_var.clone()
    expected = torch.nn.functional.batch_norm(x, new_mean, new_var, w, b, True, 0.1, 1e-5)
    grad = torch.randn_like(x)
    expected_grads = torch.autograd.grad(expected, (x, w, b), grad)
    x, w, b, parts = x.detach(), w.detach(), b.detach(), (slice(0, 1), slice(1, 4))
    c = torch.zeros(3)

    stats = [_lower("aten.batch_norm_stats.default", (x[p], 1e-5), (c, c)) for p in parts]
    counts = torch.tensor([10.0, 30.0])
    with jax.enable_x64(True):
        gathered = batch_norm.gather_stats(
            *(to_jax(torch.stack(s)) for s in zip(*stats)),
            *(to_jax(t) for t in (running_mean, running_var)),
            0.1,
            1e-5,
            to_jax(counts),
        )
    mean, rstd, got_mean, got_var = (to_torch(t) for t in gathered)
    torch.testing.assert_close(got_mean, new_mean)
    torch.testing.assert_close(got_var, new_var)

    for p in parts:
        args = (x[p], w, b, mean, rstd, 1e-5)
        _check("aten.batch_norm_elemt.default", args, (expected[p].detach(),), rtol=1e-5, atol=1e-5)
    reduce = "aten.batch_norm_backward_reduce.default"
    sums = [
        _lower(reduce, (grad[p], x[p], mean, rstd, w, True, True, True), (c, c, c, c))
        for p in parts
    ]
    sum_dy, sum_dy_xmu, grad_w, grad_b = (sum(s) for s in zip(*sums))
    torch.testing.assert_close(grad_w, expected_grads[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grad_b, expected_grads[2])
    for p in parts:
        args = (grad[p], x[p], mean, rstd, w, sum_dy, sum_dy_xmu, counts.int())
        want = (expected_grads[0][p],)
        _check("aten.batch_norm_backward_elemt.default", args, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: torch.nn.LayerNorm(4), (3, 4)),
        (lambda: torch.nn.GroupNorm(2, 4), (3, 4, 5)),
        (lambda: torch.nn.BatchNorm1d(4), (6, 4)),
        (lambda: torch.nn.InstanceNorm1d(4, affine=True), (3, 4, 5)),
        (lambda: torch.nn.RMSNorm(4), (3, 4)),
    ],
)
def test_modules_in_half_precision_train(make, shape, dtype):
    """The device's statistics are float32, which the CPU's backward kernels would refuse."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    grads = []
    for device, wide in (("cpu", torch.float32), ("tpu", dtype)):
        module = make().to(device, wide)
        given = x.to(device, wide).detach().requires_grad_()
        module(given).float().pow(3).sum().backward()
        grads.append([p.grad.cpu().float() for p in (given, *module.parameters())])
    # Outputs are rounded to eight or eleven bits, and their cubes are summed.
    for want, have in zip(*grads, strict=True):
        torch.testing.assert_close(have, want, rtol=5e-2, atol=5e-2 * float(want.abs().max()))
