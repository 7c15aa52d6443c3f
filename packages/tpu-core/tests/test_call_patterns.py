"""Mistakes that PyTorch's meta functions let pass, after right calls of the same dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tpu_core.metrics import METRICS

Call = Callable[[Callable[..., Tensor], Callable[..., Tensor]], Any]


def put(x: Tensor, index: Any, value: Any) -> Tensor:
    x[index] = value
    return x


# A right call and wrong ones; r makes numbers and b truth values of a shape.
CALLS: dict[str, list[Call]] = {
    "mask": [
        lambda r, b: put(r(3, 4), b(3), 1.0),
        lambda r, b: put(r(3, 4), b(2), 1.0),
        lambda r, b: put(r(3, 4), b(1), 1.0),
        lambda r, b: put(r(3, 4), b(3, 1), 1.0),
    ],
    "large mask": [
        lambda r, b: put(r(900, 40), b(900), 1.0),
        lambda r, b: put(r(900, 40), b(800), 1.0),
    ],
    "soft margin": [
        lambda r, b: F.soft_margin_loss(r(5, 1), r(5, 1)),
        lambda r, b: F.soft_margin_loss(r(5, 1), r(5)),
    ],
    "cross-entropy": [
        lambda r, b: F.binary_cross_entropy(r(5), r(5), r(5)),
        lambda r, b: F.binary_cross_entropy(r(5), r(5), r(5, 1)),
    ],
    "index": [
        lambda r, b: r(3, 4).index_select(0, b(2).long()),
        lambda r, b: r(3, 4).index_select(0, b(2, 2).long()),
    ],
    "bias": [
        lambda r, b: F.linear(r(9, 6), r(1, 6), r(1)),
        lambda r, b: F.linear(r(9, 6), r(1, 6), r(3)),
    ],
    "convolution": [
        lambda r, b: F.conv2d(r(1, 2, 5, 5), r(3, 2, 3, 3)),
        lambda r, b: F.conv2d(r(1, 2, 5, 5), r(3, 2, 3)),
        lambda r, b: F.conv2d(r(1, 3, 5, 5), r(3, 2, 3, 3)),
    ],
    "transposed convolution": [
        lambda r, b: F.conv_transpose2d(r(1, 2, 5, 5), r(2, 3, 3, 3)),
        lambda r, b: F.conv_transpose2d(r(1, 3, 5, 5), r(2, 3, 3, 3)),
    ],
    "put": [
        lambda r, b: r(3, 4).put_(b(2).long(), r(2)),
        lambda r, b: r(3, 4).put_(b(2).long(), r(3)),
    ],
    "statistics": [
        lambda r, b: F.batch_norm(r(3, 4), r(4), r(4), training=True),
        lambda r, b: F.batch_norm(r(3, 4), r(4, 1), r(4), training=True),
    ],
    "no dims": [
        lambda r, b: r(2, 3).logsumexp(dim=(0, 1)),
        lambda r, b: r(2, 3).logsumexp(dim=()),
    ],
    "selection": [
        lambda r, b: r(2, 3).masked_select(b(2, 3)),
        lambda r, b: r(2, 3).masked_select(b(2, 2)),
    ],
    "target": [
        lambda r, b: F.cross_entropy(r(2, 3, 2, 2), b(2, 2, 2).long()),
        lambda r, b: F.cross_entropy(r(2, 3, 2, 2), b(2, 2, 1).long()),
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls_raise_at_the_line(name: str) -> None:
    def call(function: Call, device: str) -> Any:
        return function(
            lambda *size: torch.full(size, 0.5, device=device),
            lambda *size: torch.ones(size, dtype=torch.bool, device=device),
        )

    right, *wrong = CALLS[name]
    torch.testing.assert_close(call(right, "tpu").cpu(), call(right, "cpu"))
    for function in wrong:
        with pytest.raises((RuntimeError, IndexError)) as expected:
            call(function, "cpu")
        with pytest.raises(type(expected.value)) as found:
            call(function, "tpu")
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_right_calls_of_a_new_pattern_are_recorded() -> None:
    METRICS.reset()
    for channels, groups in ((48, 8), (96, 12), (60, 6)):
        x = torch.ones(2, channels, 7, device="tpu")
        assert F.group_norm(x, groups).shape == x.shape
    assert METRICS.snapshot()["fallbacks"] == 0
