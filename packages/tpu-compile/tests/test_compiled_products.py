"""Compiled grouped and quantized products, in every dtype that the device takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


def experts(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return F.silu(F.grouped_mm(x, w.mT, offs=offs))


def run(function: object, device: str, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(rows, 16).to(dtype), torch.randn(3, 24, 16).to(dtype)
    x, w = x.to(device).requires_grad_(), w.to(device).requires_grad_()
    offs = torch.tensor([2, 2, rows], dtype=torch.int32, device=device)
    assert callable(function)
    out = function(x, w, offs)
    return [t.detach().cpu() for t in (out, *torch.autograd.grad(out.sum(), (x, w)))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients(dtype: torch.dtype) -> None:
    compiled = torch.compile(experts, fullgraph=True)
    bound = 1e-5 if dtype == torch.float32 else 4e-2  # SiLU of a result rounded differently
    for got, want in zip(run(compiled, "tpu", 7, dtype), run(experts, "cpu", 7, dtype)):
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def test_any_number_of_rows() -> None:
    compiled = torch.compile(experts, fullgraph=True, dynamic=True)
    for rows in (7, 12, 5):
        pairs = zip(
            run(compiled, "tpu", rows, torch.float32), run(experts, "cpu", rows, torch.float32)
        )
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_fake_tensors_of_other_devices_are_pytorchs() -> None:
    with torch._subclasses.FakeTensorMode(), pytest.raises(RuntimeError, match="BF16|BFloat16"):
        a, b = (torch.empty(shape, dtype=torch.int32) for shape in ((8, 16), (2, 16, 8)))
        F.grouped_mm(a, b, offs=torch.empty(2, dtype=torch.int32))


def test_quantized_products() -> None:
    def layers(
        x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, whole: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        low, one = x.to(torch.float8_e4m3fn), torch.ones((), device=x.device)
        return (
            torch._weight_int8pack_mm(x, w, scale),
            torch._int_mm(whole, w.t()),
            torch._scaled_mm(low, low.t(), one, one, out_dtype=torch.bfloat16),
        )

    inputs = (
        torch.randn(8, 32, dtype=torch.bfloat16),
        torch.randint(-128, 128, (16, 32), dtype=torch.int8),
        torch.rand(16, dtype=torch.bfloat16),
        torch.randint(-128, 128, (8, 32), dtype=torch.int8),
    )
    compiled = torch.compile(layers, fullgraph=True)
    got = compiled(*(t.to("tpu") for t in inputs))
    for result, expected in zip(got, layers(*inputs)):
        torch.testing.assert_close(result.cpu(), expected)
