"""Attention of nested tensors in the layout `torch.jagged`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tpu_core.metrics import METRICS

HEADS, SIZE = 2, 4
# Lengths of the queries, and of keys and values.
LENGTHS = {
    "self": ((3, 5), (3, 5)),
    "cross": ((2, 3, 1), (4, 1, 6)),
    "one": ((4,), (4,)),
    "empty": ((0, 3), (0, 3)),
}


def nested(lengths: Sequence[int], seed: int, device: str) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randn(n, HEADS * SIZE, generator=g).to(device) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)


def results(name: str, device: str) -> list[Tensor]:
    """The values of the result, and the gradients."""
    queries, keys = LENGTHS[name]
    inputs = [nested(n, i, device) for i, n in enumerate((queries, keys, keys))]
    y = F.scaled_dot_product_attention(*map(heads, inputs)).transpose(1, 2)
    assert y.is_nested and y.layout == torch.jagged
    y.values().square().sum().backward()
    gradients = [x.grad.values() for x in inputs if x.grad is not None]
    return [y.offsets().cpu(), *(t.detach().cpu() for t in (y.values(), *gradients))]


@pytest.mark.usefixtures("every_tier")
@pytest.mark.parametrize("name", LENGTHS)
def test_values_and_gradients(name: str) -> None:
    expected, found = results(name, "cpu"), results(name, "tpu")
    assert len(found) == 5
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["self", "cross"])
def test_a_causal_mask_counts_from_the_first_row_of_each_sequence(name: str) -> None:
    """On the CPU PyTorch has no such kernel: each sequence by itself is the reference."""
    queries, keys = LENGTHS[name]
    q, k, v = (heads(nested(n, i, "tpu")) for i, n in enumerate((queries, keys, keys)))
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True).unbind()
    for y, *inputs in zip(found, q.unbind(), k.unbind(), v.unbind(), strict=True):
        single = [t.detach().cpu()[None] for t in inputs]
        expected = F.scaled_dot_product_attention(*single, is_causal=True)[0]
        torch.testing.assert_close(y.detach().cpu(), expected)


def test_a_sequence_knows_nothing_of_others() -> None:
    """Nor of what is not finite in them."""
    x = torch.randn(8, HEADS * SIZE)
    x[3] = float("nan")
    offsets = torch.tensor([0, 3, 5, 8])
    rows = torch.nested.nested_tensor_from_jagged(x.to("tpu"), offsets.to("tpu"))
    found = F.scaled_dot_product_attention(*[heads(rows)] * 3).transpose(1, 2).values().cpu()
    assert found[3:5].isnan().all()
    assert not torch.cat([found[:3], found[5:]]).isnan().any()


@pytest.mark.usefixtures("every_tier")
def test_all_of_it_runs_on_the_device() -> None:
    before = METRICS.snapshot()["fallbacks"]
    results("self", "tpu")
    assert METRICS.snapshot()["fallbacks"] == before


def test_errors_are_pytorchs() -> None:
    def message(device: str) -> str:
        q, k = heads(nested((3, 5), 0, device)), heads(nested((3, 5), 1, device))
        with pytest.raises(ValueError) as error:
            F.scaled_dot_product_attention(q, k.double(), k)
        return str(error.value)

    assert message("tpu") == message("cpu")
