"""Gradients of some inputs where others need none: a frozen layer, a norm on the data itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

MEAN, VARIANCE = torch.tensor([0.1, -0.4, 0.3, 0.2]), torch.tensor([0.6, 1.2, 0.8, 1.1])


def batch_norm(training: bool, statistics: bool) -> Callable[..., Tensor]:
    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        kept = [t.to(x.device, copy=True) if statistics else None for t in (MEAN, VARIANCE)]
        return F.batch_norm(x, *kept, weight, bias, training)

    return norm


def layers_of(kind: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    def layer(x: Tensor, *rest: Tensor) -> Tensor:
        states, weights = rest[:-4], list(rest[-4:])
        first = states if len(states) > 1 else states[0]
        results = kind(x, first, weights, True, 1, 0.0, True, False, False)
        return torch.cat([r.flatten() for r in results])

    return layer


CASES: dict[str, tuple[Callable[..., Tensor], Sequence[tuple[int, ...]]]] = {
    "batch_norm": (batch_norm(True, False), [(5, 4, 3), (4,), (4,)]),
    "batch_norm, statistics": (batch_norm(True, True), [(5, 4, 3), (4,), (4,)]),
    "batch_norm, evaluated": (batch_norm(False, True), [(5, 4, 3), (4,), (4,)]),
    "instance_norm": (
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        [(5, 4, 3), (4,), (4,)],
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (3,), w, b), [(5, 4, 3), (3,), (3,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(5, 4, 3), (4,), (4,)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (3,), w), [(5, 4, 3), (3,)]),
    "conv2d": (F.conv2d, [(2, 3, 7, 7), (4, 3, 3, 3), (4,)]),
    "conv_transpose1d": (F.conv_transpose1d, [(2, 3, 5), (3, 4, 3), (4,)]),
    "linear": (F.linear, [(2, 5, 3), (4, 3), (4,)]),
    "bilinear": (F.bilinear, [(5, 3), (5, 2), (4, 3, 2), (4,)]),
    "grid_sample": (
        lambda x, grid: F.grid_sample(x, grid.tanh(), align_corners=False),
        [(2, 3, 5, 5), (2, 4, 4, 2)],
    ),
    "attention, mask": (
        F.scaled_dot_product_attention,
        [(2, 2, 5, 4), (2, 2, 6, 4), (2, 2, 6, 4), (5, 6)],
    ),
    "prelu": (F.prelu, [(5, 4, 3), (4,)]),
    "gru_cell": (torch.gru_cell, [(3, 4), (3, 5), (15, 4), (15, 5), (15,), (15,)]),
    "lstm_cell": (
        lambda x, h, c, *weights: torch.cat(torch.lstm_cell(x, (h, c), *weights)),
        [(3, 4), (3, 5), (3, 5), (20, 4), (20, 5), (20,), (20,)],
    ),
    "gru": (layers_of(torch.gru), [(6, 3, 4), (1, 3, 5), (15, 4), (15, 5), (15,), (15,)]),
    "lstm": (
        layers_of(torch.lstm),
        [(6, 3, 4), (1, 3, 5), (1, 3, 5), (20, 4), (20, 5), (20,), (20,)],
    ),
}


def gradients(
    function: Callable[..., Tensor], values: Sequence[Tensor], wanted: Sequence[int], device: str
) -> list[Tensor | None]:
    inputs = [x.to(device, copy=True).requires_grad_(i in wanted) for i, x in enumerate(values)]
    result = function(*inputs)
    result.square().sum().backward()
    return [t if t is None else t.detach().cpu() for t in (result, *(x.grad for x in inputs))]


@pytest.mark.parametrize("name", CASES)
def test_of_some_inputs(name: str) -> None:
    function, shapes = CASES[name]
    torch.manual_seed(0)
    values, count = [torch.randn(shape) for shape in shapes], len(shapes)
    # Of more than four inputs each alone, and all others.
    sizes = range(1, count + 1) if count <= 4 else (1, count - 1)
    for wanted in itertools.chain(*(itertools.combinations(range(count), n) for n in sizes)):
        want = gradients(function, values, wanted, "cpu")
        got = gradients(function, values, wanted, "tpu")
        assert [t is None for t in got] == [t is None for t in want], wanted
        for i, (have, expected) in enumerate(zip(got, want, strict=True)):
            if have is not None:
                message = f"result {i} where {wanted} need gradients".format
                torch.testing.assert_close(
                    have, expected, rtol=1e-3, atol=1e-4, msg=lambda m, f=message: f"{f()}: {m}"
                )
