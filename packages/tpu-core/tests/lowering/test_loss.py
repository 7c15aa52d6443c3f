"""Losses and their gradients against the CPU."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest
import torch

from tpu_core.lowering import ctc, loss, margin_loss, softmax  # noqa: F401
from tpu_core.lowering.evaluate import call_lowering, to_jax, to_torch
from tpu_core.lowering.registry import REGISTRY

from .harness import CompareLowerings, _aval, check_opinfo

aten = torch.ops.aten
F = torch.nn.functional


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nll_loss", {"nll_loss_forward", "nll_loss_backward"}),
        ("mse_loss", {"mse_loss", "mse_loss_backward"}),
        ("smooth_l1_loss", {"smooth_l1_loss", "smooth_l1_loss_backward"}),
        ("huber_loss", {"huber_loss", "huber_loss_backward"}),
        ("binary_cross_entropy", {"binary_cross_entropy", "binary_cross_entropy_backward"}),
        ("binary_cross_entropy_with_logits", {"binary_cross_entropy_with_logits"}),
        ("multi_margin_loss", {"multi_margin_loss", "multi_margin_loss_backward"}),
        (
            "multilabel_margin_loss",
            {"multilabel_margin_loss_forward", "multilabel_margin_loss_backward"},
        ),
        ("soft_margin_loss", {"soft_margin_loss", "soft_margin_loss_backward"}),
    ],
)
def test_opinfo(name: str, expected: set[str]) -> None:
    torch.manual_seed(0)
    tolerances = {
        # The CPU rounds this composite to bfloat16 after each of its steps,
        "binary_cross_entropy_with_logits": {torch.bfloat16: (1.6e-2, 3e-2)},
        # and the logit that makes these samples, whose quotient is close to 1.
        "binary_cross_entropy": {torch.bfloat16: (4e-2, 1e-5)},
    }
    mode = check_opinfo(
        f"nn.functional.{name}",
        dtypes=(torch.float32, torch.bfloat16),
        samples=4,
        check_width=True,
        tolerance=tolerances.get(name),
    )
    assert not mode.failures, "\n".join(mode.failures)
    assert {f"aten.{o}.default" for o in expected} <= mode.seen


def _check(call, **options) -> CompareLowerings:
    with CompareLowerings(**options) as mode:
        call()
    assert not mode.failures, "\n".join(mode.failures)
    assert mode.seen
    return mode


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 4, 3, 2)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_nll_loss_weighs_and_ignores(shape: tuple[int, ...], reduction: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).requires_grad_()
    target = torch.randint(4, shape[:1] + shape[2:] if len(shape) > 1 else ())
    weight = torch.rand(4)

    def run() -> None:
        for w in (None, weight):
            for ignored in (-100, int(target.flatten()[0])):
                result = F.nll_loss(x, target, w, ignore_index=ignored, reduction=reduction)
                result.backward(torch.ones_like(result))

    _check(run, check_width=True)


def test_ignored_infinities_are_dropped() -> None:
    x = torch.tensor([[-math.inf, -1.0], [-2.0, -0.5]])
    _check(lambda: F.nll_loss(x, torch.tensor([0, 1]), ignore_index=0))
    _check(lambda: F.nll_loss(x, torch.tensor([0, 0]), ignore_index=0))  # nothing left: NaN


def test_empty_batch() -> None:
    x, target = torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)
    _check(lambda: [F.nll_loss(x, target, reduction=r) for r in ("none", "mean", "sum")])
    _check(lambda: [F.mse_loss(x, x, reduction=r) for r in ("none", "mean", "sum")])


def test_cross_entropy_in_bfloat16() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 10, dtype=torch.bfloat16, requires_grad=True)
    # The CPU's log_softmax in bfloat16 is off by a unit of its operands (see test_softmax.py).
    _check(
        lambda: F.cross_entropy(x, torch.arange(6)).backward(),
        tolerance={torch.bfloat16: (1.6e-2, 1e-2)},
    )


def test_a_class_out_of_range_does_not_crash() -> None:
    expected = (torch.zeros(()), torch.zeros(()))
    args = (torch.zeros(2, 3), torch.tensor([7, -5]), None, 1, -100)
    _lower("aten.nll_loss_forward.default", args, expected)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_edges_of_the_robust_losses(reduction: int) -> None:
    x = torch.tensor([-2.0, -1.0, -0.25, 0.0, 0.25, 1.0, 2.0, math.nan, math.inf])
    zero, grad = torch.zeros(9), torch.randn(9) if reduction == 0 else torch.tensor(1.5)

    def run() -> None:
        for threshold in (0.5, 1.0, 0.0):
            aten.smooth_l1_loss(x, zero, reduction, threshold)
            aten.smooth_l1_loss_backward(grad, x, zero, reduction, threshold)
        for threshold in (0.5, 1.0):
            aten.huber_loss(x, zero, reduction, threshold)
            aten.huber_loss_backward(grad, x, zero, reduction, threshold)

    assert len(_check(run).seen) == 4


def test_binary_cross_entropy_clamps_logarithms() -> None:
    x = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.5], requires_grad=True)
    target = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5])
    _check(lambda: F.binary_cross_entropy(x, target).backward())
    logits = torch.tensor([-200.0, 200.0, 0.0])
    _check(lambda: F.binary_cross_entropy_with_logits(logits, target[:3], pos_weight=target[:3]))


def test_mse_loss_promotes() -> None:
    x, target = torch.randn(3), torch.randn(3, dtype=torch.float64)
    _check(lambda: aten.mse_loss(x, target))
    _check(lambda: aten.mse_loss(x.bfloat16(), x.bfloat16() + 1))


def _lower(op: str, args: tuple[Any, ...], expected: tuple[Any, ...]) -> list[torch.Tensor]:
    out = tuple(_aval(t) for t in expected)
    with jax.enable_x64(True):
        args = tuple(to_jax(a) if isinstance(a, torch.Tensor) else a for a in args)
        return [to_torch(r) for r in call_lowering(REGISTRY.get(op), args, {}, out)]


@pytest.mark.parametrize("concatenated", [False, True])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_loss(concatenated: bool, zero_infinity: bool) -> None:
    torch.manual_seed(0)
    log_probs = torch.randn(7, 4, 5).log_softmax(-1)
    targets = torch.tensor([[2, 2, 2], [3, 1, 4], [1, 1, 1], [1, 1, 2]])
    # The last one is impossible where it has too few steps for its repeated label.
    inputs, lengths = [7, 5, 6, 3 if zero_infinity else 7], [3, 2, 0, 3]
    if concatenated:
        targets = torch.cat([t[:n] for t, n in zip(targets, lengths)])
    args = (log_probs, targets, inputs, lengths)
    expected = aten._ctc_loss(*args, 0, zero_infinity)
    got = _lower("aten._ctc_loss.default", (*args, 0, zero_infinity), expected)
    torch.testing.assert_close(got[0], expected[0])
    for row, (steps, length) in enumerate(zip(inputs, lengths)):  # ATen leaves the rest undefined
        used = (row, slice(steps), slice(2 * length + 1))
        torch.testing.assert_close(got[1][used], expected[1][used])

    grad = torch.randn(4)
    want = aten._ctc_loss_backward(grad, *args, *expected, 0, zero_infinity)
    args = (grad, *args, *got, 0, zero_infinity)
    # Posteriors are differences of sums of 7 logarithms: a few more units in the last place.
    (result,) = _lower("aten._ctc_loss_backward.default", args, (want,))
    torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-5)


def test_a_tpu_compares_where_a_cpu_gathers() -> None:
    """The scores that the labels name are the same, bit by bit; those out of range are clamped."""
    x = torch.randn(2, 5, 3)
    x[0, 1], x[1, 2] = -math.inf, math.nan
    labels = torch.tensor([[0, 4, 9], [-1, 2, 1]])
    for dtype in (torch.float32, torch.bfloat16):
        given = to_jax(x.to(dtype)), to_jax(labels)
        want, got = (to_torch(f(*given, 1)) for f in (loss.pick, loss._pick_by_comparison))
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    call = jax.jit(lambda x, y: loss.nll_loss(x, y, None, 1, -100, out=[x])[0])
    for platform, gathers in (("cpu", True), ("tpu", False)):
        text = call.trace(*given).lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.gather" in text) == gathers
