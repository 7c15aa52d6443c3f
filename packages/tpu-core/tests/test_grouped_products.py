"""``torch.nn.functional.grouped_mm`` on the device: gradients and mistakes as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

ENDS = [[3, 3, 10], [0, 7, 13], [2, 5, 11]]


def run(
    device: str, ends: list[int], dtype: torch.dtype, transposed: bool
) -> tuple[torch.Tensor, ...]:
    """Result and gradients, without the rows that no group holds."""
    torch.manual_seed(0)
    a, w = torch.randn(13, 16).to(dtype), torch.randn(3, 24, 16).to(dtype)
    w = w if transposed else w.mT.contiguous()
    x, y = a.to(device).requires_grad_(), w.to(device).requires_grad_()
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    out = F.grouped_mm(x, y.mT if transposed else y, offs=offs)[: ends[-1]]
    grads = torch.autograd.grad(out.float().square().sum(), (x, y))
    return out.detach().cpu(), grads[0].cpu()[: ends[-1]], grads[1].cpu()


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", ENDS)
def test_gradients(ends: list[int], dtype: torch.dtype, transposed: bool) -> None:
    bound = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 0.1}
    for got, want in zip(*(run(d, ends, dtype, transposed) for d in ("tpu", "cpu"))):
        torch.testing.assert_close(got, want, **bound)


def test_without_offsets_and_with_lengths_that_differ() -> None:
    a, b = torch.randn(3, 8, 16), torch.randn(3, 16, 8)
    torch.testing.assert_close(
        F.grouped_mm(a.to("tpu"), b.to("tpu")).cpu(), F.grouped_mm(a, b), rtol=1e-5, atol=1e-5
    )
    named = F.grouped_mm(a.to("tpu"), b.to("tpu"), out_dtype=torch.float32)
    assert named.dtype == torch.float32
    a, b, offs = torch.randn(8, 16), torch.randn(12, 8), torch.tensor([4, 9], dtype=torch.int32)
    got = F.grouped_mm(a.to("tpu"), b.to("tpu"), offs=offs.to("tpu"))
    torch.testing.assert_close(got.cpu(), F.grouped_mm(a, b, offs=offs), rtol=1e-5, atol=1e-5)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


DOUBLE, HALF = torch.float64, torch.bfloat16
MISTAKES: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "contraction": ((ones(8, 16), ones(2, 8, 8)), {"offs": ends(4, 8)}),
    "no offsets": ((ones(8, 16), ones(2, 16, 8)), {}),
    "offsets of none": ((ones(2, 8, 16), ones(2, 16, 8)), {"offs": ends(4, 8)}),
    "offsets of 64 bits": ((ones(8, 16), ones(2, 16, 8)), {"offs": ends(4, 8).long()}),
    "offsets of two dims": ((ones(8, 16), ones(2, 16, 8)), {"offs": ends(4, 8)[None]}),
    "groups": ((ones(8, 16), ones(2, 16, 8)), {"offs": ends(4, 8, 8)}),
    "batches": ((ones(3, 8, 16), ones(2, 16, 8)), {}),
    "bias": ((ones(8, 16), ones(2, 16, 8)), {"offs": ends(4, 8), "bias": ones(8)}),
    "result": (
        (ones(8, 16, dtype=HALF), ones(2, 16, 8, dtype=HALF)),
        {"offs": ends(4, 8), "out_dtype": torch.float32},
    ),
    "two dtypes": ((ones(8, 16, dtype=HALF), ones(2, 16, 8)), {"offs": ends(4, 8)}),
    "float64": ((ones(8, 16, dtype=DOUBLE), ones(2, 16, 8, dtype=DOUBLE)), {"offs": ends(4, 8)}),
    "one dim": ((ones(16), ones(2, 16, 8)), {"offs": ends(4, 8)}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_the_cpus(name: str) -> None:
    args, options = MISTAKES[name]

    def message(move: Callable[[torch.Tensor], torch.Tensor]) -> str:
        moved = {k: move(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        with pytest.raises(RuntimeError) as raised:
            F.grouped_mm(*map(move, args), **moved)
        return str(raised.value)

    assert message(lambda t: t.to("tpu")) == message(lambda t: t)
