"""The device has no nested or quantized tensors: the error says what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tpu_core.errors import UnsupportedOpError


@pytest.mark.parametrize(
    "make, remedy",
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2)]).to("tpu"), "layout=torch.jagged"),
        (
            lambda: torch.nested.as_nested_tensor(
                [torch.ones(n, device="tpu", requires_grad=True) for n in (2, 3)]
            ),
            "layout=torch.jagged",
        ),
        (
            lambda: torch.nested.as_nested_tensor(torch.ones(2, 3, device="tpu")),
            "layout=torch.jagged",
        ),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8).to("tpu"),
            "fake_quantize_per_tensor_affine",
        ),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3, device="tpu"), 0.1, 0, torch.qint8),
            "fake_quantize_per_tensor_affine",
        ),
        (
            lambda: torch.quantize_per_channel(
                torch.ones(2, 3, device="tpu"),
                torch.tensor([0.1, 0.2], device="tpu"),
                torch.zeros(2, dtype=torch.int64, device="tpu"),
                0,
                torch.qint8,
            ),
            "fake_quantize_per_tensor_affine",
        ),
    ],
)
@pytest.mark.parametrize("tier", ["compiled", "auto"], indirect=True)
@pytest.mark.usefixtures("tier")
@pytest.mark.filterwarnings("ignore:.*(nested|CSR|deprecated)")
def test_other_layouts(make: Callable[[], object], remedy: str) -> None:
    with pytest.raises(UnsupportedOpError, match="device 'tpu' has none") as raised:
        make()
    assert remedy in str(raised.value)
