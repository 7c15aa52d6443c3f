"""Sums of sparse gradients: in the default tiers by CPU kernels, with their results to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tpu_core.metrics import METRICS


def window(y: Tensor) -> Tensor:
    """A view with an offset; on the CPU none, where ATen counts the offset twice."""
    return torch.stack([y, y])[1] if y.device.type == "tpu" else y


SIZES = {"rows": (7, 3), "one row": (1, 3), "elements": (7,), "no row": (0, 3), "blocks": (5, 2, 3)}
Call = Callable[[Tensor, Tensor], Tensor]
CALLS: dict[str, Call] = {
    "coalesce": lambda x, y: x.coalesce(),
    "sum": lambda x, y: y.add_(x),
    "sum, scaled": lambda x, y: y.add_(x, alpha=-0.1),
    "sum of a window": lambda x, y: window(y).add_(x, alpha=2),
    "mask": lambda x, y: y.sparse_mask(x),
    "mask, coalesced": lambda x, y: y.sparse_mask(x.coalesce()),
}


def gradient(size: tuple[int, ...], count: int, dims: int, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(count)
    count = count if size[0] else 0
    rows = [torch.randint(max(n, 1), (count,), generator=g) for n in size[:dims]]
    values = torch.randn(count, *size[dims:], generator=g).to(dtype)
    return torch.sparse_coo_tensor(torch.stack(rows), values, size)


def parts(x: Tensor) -> list[Tensor]:
    return [x] if x.layout == torch.strided else [x._indices(), x._values()]


@pytest.mark.usefixtures("every_tier")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("size", SIZES)
def test_values(size: str, call: str) -> None:
    dtypes = (torch.float32, torch.float64)
    for count, dtype, dims in itertools.product((0, 1, 2, 40), dtypes, (1, 2)):
        if dims > len(SIZES[size]):
            continue
        x = gradient(SIZES[size], count, dims, dtype)
        y = torch.linspace(-3, 2, x.numel(), dtype=dtype).reshape(x.shape)
        expected = CALLS[call](x.clone(), y.clone())
        found = CALLS[call](x.to("tpu"), y.to("tpu"))
        assert found.device.type == "tpu"
        assert (found.layout, found.shape) == (expected.layout, expected.shape)
        if expected.layout != torch.strided:
            assert found.is_coalesced() == expected.is_coalesced()
        for a, b in zip(parts(found), parts(expected), strict=True):
            torch.testing.assert_close(a.cpu(), b)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("optimizer", ["SparseAdam", "Adagrad", "SGD"])
def test_weights_are_the_cpus_to_the_bit(optimizer: str) -> None:
    fallbacks = METRICS.snapshot()["fallbacks"]

    def weights(device: str) -> Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(9, 4, sparse=True).to(device)
        step = getattr(torch.optim, optimizer)(table.parameters(), lr=0.1)
        for i in range(6):
            step.zero_grad()
            chosen = torch.arange(5 * i).fmod(9 - i).to(device)
            table(chosen).tanh().sum().backward()
            step.step()
        return table.weight.detach().cpu()

    assert torch.equal(weights("tpu"), weights("cpu"))
    assert METRICS.snapshot()["fallbacks"] == fallbacks


@pytest.mark.usefixtures("every_tier")
def test_operands_keep_their_values_and_views_see_a_sum() -> None:
    x = gradient((6, 2), 9, 1, torch.float32).to("tpu")
    y = torch.arange(12.0, device="tpu").view(6, 2)
    before, view, twin = x._values().cpu(), y[2:4], y.clone()
    y.add_(x, alpha=3)
    assert torch.equal(x._values().cpu(), before)
    assert torch.equal(view.cpu(), y.cpu()[2:4])
    assert torch.equal(twin.cpu(), torch.arange(12.0).view(6, 2))
    summed = x.coalesce()
    x._values().zero_()
    # The sum was rounded at the size of `y`, up to 11.
    torch.testing.assert_close(summed.to_dense(), (y - twin) / 3, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("every_tier")
def test_errors_are_the_cpus() -> None:
    x = gradient((6, 2), 4, 1, torch.float32)
    wrong: dict[str, Call] = {
        "sizes": lambda x, y: y[:5].add_(x),
        "a number of parts": lambda x, y: y.add_(x, alpha=1j),
        "dtypes": lambda x, y: y.long().add_(x),
        "sizes of a mask": lambda x, y: y[:5].sparse_mask(x),
    }
    for name, call in wrong.items():
        messages = []
        for device in ("cpu", "tpu"):
            with pytest.raises(RuntimeError) as error:
                call(x.to(device), torch.ones(6, 2, device=device))
            messages.append(str(error.value))
        assert messages[0] == messages[1], name
