"""Results lie in memory as those of the CPU do, in programs too: ``view`` asks for no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytestmark = [pytest.mark.usefixtures("tier")]

Op = Callable[[torch.Tensor], torch.Tensor]


def _parameter(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """Ones on the device of ``x``."""
    return torch.ones(shape, device=x.device, dtype=x.dtype)


def _convolution(x: torch.Tensor, transposed: bool = False, groups: int = 1) -> torch.Tensor:
    n = x.dim() - 2
    weight = _parameter(x, 4, 4 // groups, *[3] * n)
    name = f"conv_transpose{n}d" if transposed else f"conv{n}d"
    return getattr(F, name)(x, weight, groups=groups)


# The meta functions of torch 2.11 have two batch dims of a transform in another order.
_TRANSFORMED = (3,) if torch.__version__.startswith("2.11.") else (3, 4)

# Name, op, and the dims that its input may have.
_OPS: list[tuple[str, Op, tuple[int, ...]]] = [
    ("convolution", _convolution, (3, 4, 5)),
    ("transposed convolution", lambda x: _convolution(x, transposed=True), (3, 4)),
    ("depthwise convolution", lambda x: _convolution(x, groups=4), (3, 4)),
    ("pixel_shuffle", lambda x: F.pixel_shuffle(torch.cat([x, x], 1), 2), (4,)),
    ("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (4,)),
    ("channel_shuffle", lambda x: F.channel_shuffle(x, 2), (4, 5)),
    ("reflection", lambda x: F.pad(x, (1,) * 2 * (x.dim() - 2), mode="reflect"), (3, 4, 5)),
    ("replication", lambda x: F.pad(x, (1,) * 2 * (x.dim() - 2), mode="replicate"), (3, 4, 5)),
    ("roll", lambda x: x.roll((1, 2), (1, 2)), (3, 4, 5)),
    ("roll of the elements", lambda x: x.roll(1), (3, 4)),
    ("batch norm", lambda x: F.batch_norm(x, None, None, training=True), (3, 4, 5)),
    (
        "batch norm, evaluated",
        lambda x: F.batch_norm(x, _parameter(x, 4), _parameter(x, 4)),
        (3, 4, 5),
    ),
    ("instance norm", F.instance_norm, (3, 4)),
    ("glu", lambda x: F.glu(x, 1), (3, 4, 5)),
    ("dropout", lambda x: F.dropout(x, 0.5), (3, 4)),
    ("rrelu", F.rrelu, (3, 4)),
    ("mse_loss", lambda x: F.mse_loss(x, x.detach(), reduction="none"), (3, 4)),
    ("huber_loss", lambda x: F.huber_loss(x, x.detach(), reduction="none"), (3, 4)),
    ("floor_divide", lambda x: x.detach() // _parameter(x), (3, 4)),
    ("normal", lambda x: torch.normal(x.detach(), x.detach().abs()), (3, 4)),
    ("max_unpool2d", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (4,)),
    ("rfft2", lambda x: torch.fft.rfft2(x), _TRANSFORMED),
    ("irfft2", lambda x: torch.fft.irfft2(x), _TRANSFORMED),
]
_CASES = [
    pytest.param(op, dims, layout, id=f"{name}, {layout}, {dims} dims")
    for name, op, allowed in _OPS
    for dims in allowed
    for layout in ("contiguous", "channels last", "reversed", "transposed")
]


def _input(dims: int, layout: str) -> torch.Tensor:
    x = torch.randn([2, 4, 6, 8, 6][:dims])
    if layout == "channels last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "reversed":
        return x.permute(*range(dims)[::-1]).contiguous().permute(*range(dims)[::-1])
    return x.transpose(0, 1).contiguous().transpose(0, 1) if layout == "transposed" else x


def _on(x: torch.Tensor, device: str) -> torch.Tensor:
    copy = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
    return copy.copy_(x)


@pytest.mark.parametrize("tier", ["compiled", "auto"], indirect=True)
@pytest.mark.parametrize("op, dims, layout", _CASES)
def test_strides(op: Op, dims: int, layout: str) -> None:
    x = _input(dims, layout)
    strides = []
    for device in ("cpu", "tpu"):
        given = _on(x, device).requires_grad_()
        y = op(given)
        found = [y.stride()]
        if y.requires_grad and not y.is_complex():
            gradient = _on(torch.ones_like(y, device="cpu"), device)
            found.append(torch.autograd.grad(y, given, gradient)[0].stride())
        strides.append(found)
    assert strides[1] == strides[0]


@pytest.mark.parametrize("tier", ["compiled", "auto"], indirect=True)
@pytest.mark.parametrize("dims", [3, 4, 5])
def test_values(dims: int) -> None:
    x = _input(dims, "channels last")
    weight = torch.randn(6, 4, *[3] * (dims - 2))
    found = []
    for device in ("cpu", "tpu"):
        given, w = _on(x, device).requires_grad_(), _on(weight, device).requires_grad_()
        y = getattr(F, f"conv{dims - 2}d")(given, w)
        rows = y.movedim(1, -1)
        rows = rows.contiguous() if dims == 3 else rows.view(-1, 6)  # an error with other strides
        (rows * rows.cumsum(0)).sum().backward()
        found.append([t.cpu() for t in (y.detach(), given.grad, w.grad)])
    for result, expected in zip(*found[::-1]):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-2)
        assert result.stride() == expected.stride()


@pytest.mark.parametrize("tier", ["compiled", "auto"], indirect=True)
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_losses_of_nothing(loss: Callable[..., torch.Tensor]) -> None:
    x = torch.zeros(0, 5, device="tpu", requires_grad=True)
    fallbacks = torch.tpu.metrics()["fallbacks"]
    value = loss(x, x.detach())
    value.backward()
    assert value.isnan()
    assert x.grad is not None and x.grad.shape == (0, 5)
    assert torch.tpu.metrics()["fallbacks"] == fallbacks
