"""The device has no sparse, nested or quantized tensors: the error says what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

from tpu_core.errors import UnsupportedOpError

INDICES = torch.tensor([[1, 2, 4, 4]])


def embedding() -> None:
    nn.Embedding(10, 3, sparse=True).to("tpu")(INDICES.to("tpu")).sum().backward()


def bag() -> None:
    nn.EmbeddingBag(10, 3, sparse=True).to("tpu")(INDICES.to("tpu")).sum().backward()


def made() -> None:
    torch.sparse_coo_tensor(INDICES.to("tpu"), torch.ones(4, device="tpu"), (5,))


def moved() -> None:
    torch.eye(3).to_sparse().to("tpu")


@pytest.mark.parametrize("make", [embedding, bag, made, moved])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_the_error_says_what_to_do(make: Callable[[], None]) -> None:
    with pytest.raises(UnsupportedOpError, match="device 'tpu' has none") as raised:
        make()
    assert "Use sparse=False" in str(raised.value)
    assert raised.value.line is not None and "test_other_layouts.py" in raised.value.line


@pytest.mark.parametrize(
    "make, remedy",
    [
        (lambda: torch.eye(3).to_sparse_csr().to("tpu").to_dense(), "Use sparse=False"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]).to("tpu"), "layout=torch.jagged"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8).to("tpu"),
            "fake_quantize_per_tensor_affine",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(nested|CSR|deprecated)")
def test_other_layouts(make: Callable[[], object], remedy: str) -> None:
    torch.ones(1, device="tpu")
    with pytest.raises(UnsupportedOpError, match="device 'tpu' has none") as raised:
        make()
    assert remedy in str(raised.value)


def test_inference_with_a_sparse_gradient_needs_none() -> None:
    module = nn.Embedding(10, 3, sparse=True)
    expected = module(INDICES)
    assert torch.equal(module.to("tpu")(INDICES.to("tpu")).cpu(), expected)


def test_sparse_tensors_of_the_cpu_are_untouched() -> None:
    module = nn.Embedding(10, 3, sparse=True)
    module(INDICES).sum().backward()
    assert module.weight.grad is not None and module.weight.grad.is_sparse
