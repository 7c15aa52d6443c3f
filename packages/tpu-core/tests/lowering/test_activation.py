"""Activation functions and their gradients against the CPU."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tpu_core import lowering
from tpu_core.lowering.evaluate import call_lowering, to_jax, to_torch
from tpu_core.lowering.registry import REGISTRY

from .harness import CompareLowerings, check_opinfo

lowering.load()

# OpInfo name to the overloads that its forward and backward must reach.
OPS = {
    "nn.functional.relu": "relu threshold_backward",
    "nn.functional.gelu": "gelu gelu_backward",
    "nn.functional.silu": "silu silu_backward",
    "nn.functional.mish": "mish mish_backward",
    "nn.functional.elu": "elu elu_backward",
    "nn.functional.celu": "celu elu_backward",
    "nn.functional.selu": "elu elu_backward",
    "nn.functional.hardtanh": "hardtanh hardtanh_backward",
    "nn.functional.hardswish": "hardswish hardswish_backward",
    "nn.functional.hardsigmoid": "hardsigmoid hardsigmoid_backward",
    "nn.functional.leaky_relu": "leaky_relu leaky_relu_backward",
    "nn.functional.softplus": "softplus softplus_backward",
    "nn.functional.threshold": "threshold threshold_backward",
    "nn.functional.glu": "glu glu_backward",
    "nn.functional.logsigmoid": "log_sigmoid_forward log_sigmoid_backward",
    "nn.functional.prelu": "_prelu_kernel _prelu_kernel_backward",
    "nn.functional.rrelu": "rrelu_with_noise_backward",
    "nn.functional.hardshrink": "hardshrink hardshrink_backward",
    "nn.functional.softshrink": "softshrink softshrink_backward",
    "logit": "logit logit_backward",
    "sigmoid": "sigmoid sigmoid_backward",
    "tanh": "tanh tanh_backward",
}
# The CPU evaluates logit in bfloat16 step by step, the lowering in float32.
STEPWISE = {torch.bfloat16: (5e-2, 1e-2)}


@pytest.mark.parametrize("name", OPS)
def test_opinfo(name: str) -> None:
    mode = check_opinfo(
        name,
        dtypes=(torch.float32, torch.bfloat16, torch.int64),
        samples=4,
        tolerance=STEPWISE if name == "logit" else {},
        check_width=True,
    )
    assert not mode.failures
    assert {f"aten.{op}.default" for op in OPS[name].split()} <= mode.seen


def compare(fn, *args) -> None:
    mode = CompareLowerings(check_width=True)
    with mode:
        fn(*args)
    assert not mode.failures
    assert mode.seen


# At the kinks, far out, and not a number.
VALUES = [math.nan, 0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 0.5, -0.5, 6.0, 20.5, -100.0, 100.0]


@pytest.mark.parametrize("name", [n for n in OPS if n.startswith("nn") and "rrelu" not in n])
def test_kinks(name: str) -> None:
    fn = getattr(F, name.removeprefix("nn.functional."))
    arguments = {"_threshold": (0.5, 2.0), "prelu": (torch.tensor([0.3]),)}
    x = torch.tensor(VALUES[:12], requires_grad=True)

    def call() -> None:
        result = fn(x, *arguments.get(fn.__name__, ()))
        result.backward(torch.ones_like(result))

    compare(call)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gelu(dtype: torch.dtype, approximate: str) -> None:
    x = torch.linspace(-8, 8, 101).to(dtype).requires_grad_()
    compare(lambda: F.gelu(x, approximate=approximate).backward(torch.ones_like(x)))


def test_elu_backward_of_the_result() -> None:
    x = torch.randn(20, requires_grad=True)
    compare(lambda: F.elu(x.clone(), alpha=0.7, inplace=True).sum().backward())


def test_softplus_arguments() -> None:
    x = torch.randn(20, requires_grad=True)
    compare(lambda: F.softplus(x * 10, beta=2.5, threshold=3).sum().backward())


def test_logit_outside_of_its_range() -> None:
    for eps in (None, 0.1, 0.6):
        x = torch.tensor([-0.5, 0.0, 0.05, 0.5, 0.95, 1.0, 1.5], requires_grad=True)
        compare(lambda x=x, eps=eps: torch.logit(x, eps).backward(torch.ones_like(x)))


def test_hardsigmoid_gradient_in_float64() -> None:
    x = torch.tensor([-4.0, -1.0, 0.5, 5.0], dtype=torch.float64)
    grads = []
    for device in ("cpu", "tpu"):
        leaf = x.clone().to(device).requires_grad_()
        F.hardsigmoid(leaf).sum().backward()
        grads.append(leaf.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=0)


def test_rrelu_draws_slopes() -> None:
    import jax
    import numpy as np

    entry = REGISTRY.get("aten.rrelu_with_noise_functional.default")
    x = torch.tensor([[-1.0] * 500, [2.0] * 500])
    with jax.enable_x64(True):
        value, aval = to_jax(x), jax.ShapeDtypeStruct(x.shape, np.float32)
        key = jax.numpy.array([1, 2], np.uint32)
        args = (value, jax.numpy.zeros_like(value), 0.1, 0.3)
        result, noise = call_lowering(entry, (*args, True), {}, (aval, aval), key)
        fixed, _ = call_lowering(entry, (*args, False), {}, (aval, aval), key)
    result, noise = to_torch(result), to_torch(noise)
    torch.testing.assert_close(result, x * noise)
    assert (noise[1] == 1).all()
    assert 0.1 <= noise[0].min() < 0.12
    assert 0.28 < noise[0].max() < 0.3
    torch.testing.assert_close(to_torch(fixed), F.leaky_relu(x, 0.2))


def test_second_derivatives_of_glu() -> None:
    x, dx = torch.randn(4, 6), torch.randn(4, 6)
    grad, dgrad = torch.randn(4, 3), torch.randn(4, 3)
    aten = torch.ops.aten
    compare(lambda: aten.glu_jvp(F.glu(x), x, dx, 1))
    compare(lambda: aten.glu_backward_jvp(aten.glu_backward(grad, x, 1), grad, x, dgrad, dx, 1))


@pytest.mark.parametrize("fn", [F.silu, F.mish], ids=lambda fn: fn.__name__)
def test_composite_gradients_are_not_reached_while_a_graph_is_built(fn) -> None:
    """What makes it safe to give these composite ops a kernel: double backward goes around it."""
    op = f"aten.{fn.__name__}_backward.default"
    for create_graph in (False, True):
        x = torch.randn(4, dtype=torch.float64, requires_grad=True)
        with (mode := CompareLowerings()):
            torch.autograd.grad(fn(x).sum(), x, create_graph=create_graph)
        assert not mode.failures
        assert (op in mode.seen) == (not create_graph)
