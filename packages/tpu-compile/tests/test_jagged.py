"""Graphs of nested tensors in the layout `torch.jagged`, which pass the jagged length on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x * 2, x + 1).transpose(1, 2).flatten(-2)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x * 2,
    "linear": lambda x: F.linear(x, torch.ones(6, 4, device=x.device)),
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: F.layer_norm(x, (4,)),
    "sum over the jagged dim": lambda x: x.sum(1),
    "padded": lambda x: x.to_padded_tensor(0.5),
    "attention": lambda x: attention(x.unflatten(-1, (2, 2)).transpose(1, 2)),
    "several": lambda x: F.gelu(x + x.sin()).sum(-1),
}


def nested(device: str, lengths: tuple[int, ...]) -> Tensor:
    g = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randn(n, 4, generator=g).to(device) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("name", CALLS)
def test_values(name: str) -> None:
    call = CALLS[name]
    compiled = torch.compile(call)
    for lengths in ((3, 5), (2, 2, 6), (3, 5)):
        expected, found = call(nested("cpu", lengths)), compiled(nested("tpu", lengths))
        assert found.is_nested == expected.is_nested
        if expected.is_nested:
            assert torch.equal(found.offsets().cpu(), expected.offsets())
            # Strides are multiples of the length.
            assert str(found.stride()).count("j") == str(expected.stride()).count("j")
            expected, found = expected.values(), found.values()
        torch.testing.assert_close(found.cpu(), expected)


def test_training() -> None:
    def trained(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 3).to(device)
        call = layer if device == "cpu" else torch.compile(layer)
        for lengths in ((3, 5), (2, 6, 1)):
            call(nested(device, lengths)).values().square().sum().backward()
        return [p.grad.cpu() for p in layer.parameters() if p.grad is not None]

    torch.testing.assert_close(trained("tpu"), trained("cpu"))
