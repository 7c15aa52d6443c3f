"""Traced and scripted functions."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytestmark = [
    pytest.mark.usefixtures("every_tier"),
    pytest.mark.filterwarnings("ignore:.*`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:torch.jit.TracerWarning"),
]

WEIGHT = torch.arange(9.0).reshape(1, 1, 3, 3) / 9


def set_by_mask(x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = 0.0
    y[:, 1] = x[:, 0]
    return y


TRACED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "convolution and its operand": (
        lambda x: x + F.conv2d(x, WEIGHT.to(x.device), padding=1),
        (1, 1, 5, 5),
    ),
    "torch.convolution": (
        lambda x: torch.convolution(
            x, WEIGHT.to(x.device), None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1
        ),
        (1, 1, 5, 5),
    ),
    "mask": (lambda x: x[x > 0], (2, 4)),
    "list": (lambda x: x[:, [0, 1]], (2, 4)),
    "writes by a mask and an index": (set_by_mask, (2, 4)),
    "sizes": (lambda x: x.reshape(-1, x.shape[-1] // 2).cumsum(0), (2, 4)),
}


def examples(shape: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    first, second = (torch.randn(shape, generator=g) for _ in range(2))
    return first.to(device), second.to(device)


@pytest.mark.parametrize("name", TRACED)
def test_traces_of_functions(name: str) -> None:
    function, shape = TRACED[name]
    results = []
    for device in ("cpu", "tpu"):
        first, second = examples(shape, device)
        traced = torch.jit.trace(function, first)
        results.append((traced(second).cpu(), [n.kind() for n in traced.graph.nodes()]))
    (want, ops), (got, own_ops) = results
    torch.testing.assert_close(got, want)
    assert own_ops == ops


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv1d(2, 3, 3), (1, 2, 6)),
        (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()), (2, 2, 6, 6)),
        (lambda: nn.ConvTranspose3d(2, 3, 2), (1, 2, 3, 3, 3)),
        (lambda: nn.LSTMCell(4, 5), (2, 4)),
    ],
    ids=["Conv1d", "Conv2d in training", "ConvTranspose3d", "LSTMCell"],
)
def test_traces_of_modules(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    found = []
    for device in ("cpu", "tpu"):
        torch.manual_seed(0)
        module = make().to(device)
        first, second = examples(shape, device)
        traced = torch.jit.trace(module, first, check_trace=False)
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        loaded = torch.jit.load(file)
        y = loaded(second)
        y = y if isinstance(y, Tensor) else y[0]
        y.square().sum().backward()
        found.append([y.detach().cpu(), *(p.grad.cpu() for p in loaded.parameters())])
    # With tiles (AMX) oneDNN sums the products in another order than XLA: 1.2e-5 apart.
    near = {"rtol": 1e-5, "atol": 2e-5} if torch.cpu._is_amx_tile_supported() else {}
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, **near)


def by_mask(x: Tensor) -> Tensor:
    return x[x > 0]


def by_column(x: Tensor) -> Tensor:
    return x[:, torch.arange(1, 3, device=x.device)]


def written(x: Tensor) -> Tensor:
    y = x.clone()
    y[y > 1] = -1.0
    y[:, torch.arange(1, device=x.device)] += 5.0
    return torch.cat([y, y.unbind(0)[0].unsqueeze(0)])


@pytest.mark.parametrize("function", [by_mask, by_column, written])
def test_scripted_indices(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.arange(8.0).sub(3).reshape(2, 4)
    scripted = torch.jit.script(function)
    for _ in range(3):  # the interpreter profiles, then specializes
        got = scripted(x.to("tpu"))
        assert got.device.type == "tpu"
        torch.testing.assert_close(got.cpu(), function(x), rtol=0, atol=0)
