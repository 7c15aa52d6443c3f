"""Convolutions and their gradients against the CPU."""

from __future__ import annotations

from functools import partial

import jax
import pytest
import torch
import torch.nn.functional as F
from jax import lax

from lowering.harness import CompareLowerings, check_opinfo
from tpu_core.dtypes import to_numpy_dtype
from tpu_core.lowering import convolution
from tpu_core.lowering import convolution_weight_gradient as weight_gradients
from tpu_core.lowering.evaluate import call_lowering, to_jax, to_torch
from tpu_core.lowering.precision import precision
from tpu_core.lowering.registry import REGISTRY

TOLERANCE = {
    # Sums of up to ten thousand products in another order than the CPU's.
    torch.float32: (1e-4, 1e-4),
    torch.complex64: (1e-4, 1e-4),
    # The CPU sums a transposed convolution in bfloat16: each partial sum of these samples, up to a
    # few hundred, is rounded to 8 bits. `test_bfloat16_rounds_once` has the narrow bound.
    torch.bfloat16: (5e-2, 1.0),
}
NAMES = [f"nn.functional.{name}{d}d" for name in ("conv", "conv_transpose") for d in (1, 2, 3)]


@pytest.mark.parametrize("name", NAMES)
def test_opinfo(name: str) -> None:
    torch.manual_seed(0)
    mode = check_opinfo(
        name, (torch.float32, torch.bfloat16, torch.int64), 2, tolerance=TOLERANCE, check_width=True
    )
    assert not mode.failures, mode.failures
    assert mode.seen >= {"aten.convolution.default", "aten.convolution_backward.default"}


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d", "conv_transpose3d"])
def test_bfloat16_rounds_once(name: str) -> None:
    torch.manual_seed(0)
    d = int(name[-2])
    x, w = (torch.randn(2, 4, *(4,) * d), torch.randn(4, 4, *(3,) * d))
    x, w = x.bfloat16(), w.bfloat16()
    expected = getattr(F, name)(x.double(), w.double(), stride=2)
    args = ([2] * d, [0] * d, [1] * d, "transpose" in name, [0] * d, 1)
    out = (jax.ShapeDtypeStruct(tuple(expected.shape), to_numpy_dtype(torch.bfloat16)),)
    with jax.enable_x64(True):
        entry = REGISTRY.get("aten.convolution.default")
        actual = to_torch(call_lowering(entry, (to_jax(x), to_jax(w), None, *args), {}, out)[0])
    # Half a unit in the last place, and what sums in float32 lose where they cancel.
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=1e-5)


CASES = {
    "stride leaves a rest": ((2, 3, 10, 11), (4, 3, 3, 3), {"stride": (2, 3)}),
    "dilation": ((2, 3, 10, 11), (4, 3, 3, 2), {"dilation": (2, 1), "padding": (2, 1)}),
    "groups": ((2, 4, 6, 6), (6, 2, 3, 3), {"groups": 2, "padding": 1}),
    "depthwise": ((2, 4, 7, 7), (8, 1, 3, 3), {"groups": 4, "stride": 2, "padding": 1}),
    "each channel alone": ((2, 4, 7, 9), (4, 1, 3, 3), {"groups": 4, "stride": 2, "padding": 1}),
    "each channel alone, dilated": (
        *((1, 3, 9, 8), (3, 1, 3, 2)),
        {"groups": 3, "dilation": (2, 3), "stride": (1, 2), "padding": (2, 0)},
    ),
    "each channel alone, one dim": ((2, 5, 9), (5, 1, 4), {"groups": 5, "padding": 2}),
    "one position": ((2, 3, 5, 6), (4, 3, 1, 1), {"stride": (2, 3)}),
    "one position, three dims": ((2, 3, 4, 3, 5), (2, 3, 1, 1, 1), {"stride": (1, 2, 1)}),
    "wide padding": ((1, 2, 4, 4), (3, 2, 1, 1), {"padding": 2}),
    "no batch items": ((0, 2, 4, 4), (3, 2, 3, 3), {}),
    "one dim": ((2, 3, 9), (4, 3, 4), {"stride": 2, "padding": 1}),
    "three dims": ((1, 2, 5, 6, 7), (3, 2, 2, 3, 2), {"stride": (1, 2, 2)}),
    # Enough channels for the weight gradient that a CPU sums from products.
    "many channels, stride": ((2, 16, 10, 11), (17, 16, 3, 3), {"stride": (2, 3), "padding": 1}),
    "many channels, dilation": (
        *((2, 17, 10, 11), (16, 17, 3, 2)),
        {"dilation": (2, 1), "padding": (2, 1)},
    ),
    "many channels, one position": ((2, 16, 7, 7), (16, 16, 1, 1), {"stride": 2}),
    "many channels, one dim": ((2, 16, 9), (18, 16, 4), {"stride": 2, "padding": 1}),
}
TRANSPOSED = {
    "plain": ((2, 3, 5, 5), (3, 4, 3, 3), {}),
    "output padding": ((2, 3, 5, 4), (3, 4, 3, 3), {"stride": 2, "output_padding": 1}),
    "more output padding": ((1, 2, 4, 4), (2, 1, 3, 3), {"dilation": 3, "output_padding": 2}),
    "groups": ((2, 4, 5, 5), (4, 3, 3, 2), {"groups": 2, "stride": (2, 1)}),
    "crop": ((1, 2, 4, 4), (2, 2, 2, 2), {"padding": 2, "stride": 2}),
    "one dim": ((2, 3, 5), (3, 4, 4), {"stride": 2, "padding": 1}),
    "many channels": ((2, 16, 5, 4), (16, 17, 3, 3), {"stride": 2, "output_padding": 1}),
}


def _check(function, shape, weight, bias, options) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    w = torch.randn(weight, requires_grad=True)
    b = torch.randn(bias, requires_grad=True)
    mode = CompareLowerings(check_width=True, tolerance={torch.float32: (1e-5, 1e-5)})
    with mode:
        y = function(x, w, b, **options)
        y.backward(torch.randn_like(y))
    assert not mode.failures, mode.failures
    assert "aten.convolution_backward.default" in mode.seen


@pytest.mark.parametrize("case", CASES)
def test_convolution(case: str) -> None:
    shape, weight, options = CASES[case]
    _check(getattr(F, f"conv{len(shape) - 2}d"), shape, weight, weight[0], options)


@pytest.mark.parametrize("case", TRANSPOSED)
def test_transposed_convolution(case: str) -> None:
    shape, weight, options = TRANSPOSED[case]
    channels = weight[1] * options.get("groups", 1)
    _check(getattr(F, f"conv_transpose{len(shape) - 2}d"), shape, weight, channels, options)


@pytest.mark.parametrize("case", [*CASES, *(f"transposed, {case}" for case in TRANSPOSED)])
def test_integers_on_gpus(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowering for GPUs, run on the CPU."""

    forms = []

    def on_gpu(*args, default, cuda=None, **_):
        forms.append(cuda)
        return (cuda or default)(*args)

    monkeypatch.setattr(lax, "platform_dependent", on_gpu)
    transposed = case not in CASES
    shape, weight, options = TRANSPOSED[case.split(", ", 1)[1]] if transposed else CASES[case]
    x, w = torch.randint(-(2**40), 2**40, shape), torch.randint(-9, 9, weight)
    function = getattr(F, f"conv{'_transpose' * transposed}{len(shape) - 2}d")
    mode = CompareLowerings(check_width=True)
    with mode:
        function(x, w, **options)
    assert not mode.failures, mode.failures
    assert any(forms) or not x.numel()


def test_only_the_gradients_asked_for() -> None:
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3, requires_grad=True)
    mode = CompareLowerings()
    with mode:
        F.conv2d(x, w).sum().backward()
    assert not mode.failures, mode.failures


@pytest.mark.parametrize("transposed", [False, True])
def test_overrideable_twins(transposed: bool) -> None:
    """PrivateUse1 is sent to the ``overrideable`` overloads, which share the functions."""
    assert (
        REGISTRY.get("aten.convolution.default").fn
        is REGISTRY.get("aten.convolution_overrideable.default").fn
    )
    args = ([2, 1], [1, 0], [1, 2], transposed, [0, 0], 1)
    x = torch.randn(2, 3, 8, 8)
    w = torch.randn((3, 4, 3, 3) if transposed else (4, 3, 3, 3))
    y = torch.ops.aten.convolution(x, w, None, *args)
    grad = torch.randn_like(y)
    mask = [True, True, True]
    expected = torch.ops.aten.convolution_backward(grad, x, w, [4], *args, mask)
    with jax.enable_x64(True):
        fn = REGISTRY.get("aten.convolution_backward_overrideable.default").fn
        got = fn(to_jax(grad), to_jax(x), to_jax(w), *args, mask)
    for g, e in zip(got, expected):
        torch.testing.assert_close(to_torch(g), e, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "features", "kernel", "stride", "dilation"),
    [
        ((2, 3, 9, 8), 4, (3, 2), (2, 1), (1, 2)),
        ((2, 1, 12), 5, (5,), (1,), (1,)),
        ((1, 7, 4, 5, 6), 2, (3, 1, 2), (1, 2, 1), (1, 1, 1)),
    ],
)
def test_weight_gradient_of_few_channels_for_tpus(shape, features, kernel, stride, dilation):
    """A TPU's form of it, here run on the CPU."""
    torch.manual_seed(0)
    rank = len(kernel)
    x, w = torch.randn(shape), torch.randn(features, shape[1], *kernel, requires_grad=True)
    padding = tuple(k // 2 for k in kernel)
    y = torch.ops.aten.convolution(x, w, None, stride, padding, dilation, False, [0] * rank, 1)
    grad = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, w, grad)
    geometry = (kernel, stride, padding, dilation)
    correlation = partial(
        weight_gradients._weight_gradient_by_correlation,
        **dict(zip(("kernel_size", "stride", "padding", "dilation"), geometry)),
        groups=1,
    )
    got = weight_gradients._of_few_channels(to_jax(x), to_jax(grad), correlation)
    torch.testing.assert_close(to_torch(got), expected, rtol=1e-5, atol=1e-4)

    gradient = jax.jit(lambda x, grad: weight_gradients.weight_gradient(x, grad, *geometry, 1))
    lowered = gradient.trace(to_jax(x), to_jax(grad)).lower(lowering_platforms=("tpu",))
    kernel_shape = "x".join(map(str, (features, 8, *kernel)))
    assert f"tensor<{kernel_shape}xf32>" in lowered.as_text()


GROUPED = [  # image, features, kernel, stride, padding, dilation, groups
    ((2, 6, 9, 8), 9, (3, 2), (2, 1), (1, 0), (1, 2), 3),
    ((3, 4, 12), 8, (5,), (3,), (4,), (1,), 4),
    ((1, 4, 5, 6, 7), 2, (3, 1, 2), (1, 2, 1), (0, 0, 1), (1, 1, 2), 2),
    ((2, 6, 6, 6), 6, (3, 3), (2, 2), (1, 1), (1, 1), 6),
    ((1, 4, 7, 9), 4, (2, 1), (3, 2), (0, 0), (1, 2), 2),  # outputs that no tap reads
]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(
    ("shape", "features", "kernel", "stride", "padding", "dilation", "groups"), GROUPED
)
def test_grouped_convolutions(
    shape, features, kernel, stride, padding, dilation, groups, platform, monkeypatch
):
    """A platform's form of them, here run on the CPU: convolution, both gradients, transposed."""
    monkeypatch.setattr(
        lax,
        "platform_dependent",
        lambda *args, **ways: (ways.get(platform) or ways["default"])(*args),
    )
    torch.manual_seed(0)
    rank = len(kernel)
    for transposed in False, True:
        wide = (shape[1], features // groups) if transposed else (features, shape[1] // groups)
        x, w = torch.randn(shape), torch.randn(*wide, *kernel)
        args = (stride, padding, dilation, transposed, [0] * rank, groups)
        y = torch.ops.aten.convolution(x, w, None, *args)
        grad = torch.randn_like(y)
        mask = [True, True, False]
        expected = torch.ops.aten.convolution_backward(grad, x, w, None, *args, mask)

        def step(x, w, grad, args=args, mask=mask):
            y = convolution.convolution(x, w, None, *args)
            return y, convolution.convolution_backward(grad, x, w, None, *args, mask)[:2]

        arrays = [to_jax(t) for t in (x, w, grad)]
        got, gradients = jax.jit(step)(*arrays)
        torch.testing.assert_close(to_torch(got), y, rtol=1e-5, atol=1e-4)
        for g, e in zip(gradients, expected):
            torch.testing.assert_close(to_torch(g), e, rtol=1e-5, atol=1e-4)
        if platform == "tpu":
            assert "stablehlo.convolution" not in jax.jit(step).lower(*arrays).as_text()
            with precision("medium"):
                lowered = jax.jit(partial(step)).lower(*arrays)
            assert "stablehlo.convolution" in lowered.as_text()
