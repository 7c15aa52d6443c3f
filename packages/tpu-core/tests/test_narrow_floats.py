"""Floats of 16 and 8 bits: conversions of every value, and products in every form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tpu_core.runtime import runtime
from tpu_core.torch_compat import FLOAT8_SATURATES

pytestmark = pytest.mark.usefixtures("fusion_emitters")

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
BITS = torch.arange(-(2**15), 2**15).to(torch.int16)
HALVES = BITS.view(torch.float16)
SOURCES = {
    "float16": HALVES,
    "bfloat16": BITS.view(torch.bfloat16),
    # Beside each half, where rounding twice makes a difference.
    "float32": torch.cat([HALVES.float() * (1 + 2.0**-20), HALVES.float() * (1 - 2.0**-20)]),
    "float64": torch.cat([HALVES.double() * (1 + 2.0**-40), HALVES.double() * (1 - 2.0**-40)]),
    "int64": torch.arange(-70000, 70000, 3),
    "uint8": torch.arange(256, dtype=torch.uint8),
}


def same(a, b):
    """Equal values of equal signs, or both NaN (whose bits may differ)."""
    a, b = a.float(), b.float()
    return bool((((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_every_value_becomes_the_float8_of_the_cpu(dtype):
    for name, source in SOURCES.items():
        assert same(source.to("tpu").to(dtype).cpu(), source.to(dtype)), name
    for other in FLOAT8:
        source = torch.arange(256).to(torch.uint8).view(other)
        assert same(source.to("tpu").to(dtype).cpu(), source.to(dtype)), other
        assert same(source.to("tpu").float().cpu(), source.float()), other


def test_float8_saturates_where_the_cpu_does():
    x = torch.tensor([500.0, 1e9, float("inf"), -float("inf"), float("nan")])
    y = x.to("tpu").to(torch.float8_e4m3fn).cpu()
    if not FLOAT8_SATURATES:  # torch 2.11
        assert bool(y.float().isnan().all())
        return
    assert y.float().tolist()[:4] == [448, 448, 448, -448] and bool(y.float()[4].isnan())
    out = torch.zeros(2, dtype=torch.float8_e4m3fn, device="tpu")
    out[:] = torch.tensor([600.0, -600.0], device="tpu")
    assert out.float().tolist() == [448, -448]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wide_numbers_round_as_on_the_cpu(dtype):
    sources = [SOURCES["float64"], SOURCES["int64"] * 12345]
    if not runtime().client.has_fault("conversions-are-combined"):
        sources.append(SOURCES["int64"].int() * 1001)
    for source in sources:
        normal = source[source.double().abs() >= torch.finfo(torch.float32).tiny]
        assert same(normal.to("tpu").to(dtype).cpu(), normal.to(dtype))


def relu(x):
    return torch.where(x > 0, x, torch.zeros_like(x))


PRODUCTS = {
    "matrices": (lambda a, b: a @ b, (16, 20), (20, 24)),
    "left transposed": (lambda a, b: a.t() @ b, (20, 16), (20, 24)),
    "right transposed": (lambda a, b: a @ b.t(), (16, 20), (24, 20)),
    "both transposed": (lambda a, b: a.t() @ b.t(), (20, 16), (24, 20)),
    "through a mask": (lambda a, b: relu(a.t()) @ relu(b), (64, 10), (64, 32)),
    "batched": (lambda a, b: a @ b, (3, 8, 5), (3, 5, 7)),
    "batched, transposed": (lambda a, b: relu(a.mT) @ relu(b), (3, 5, 8), (3, 5, 7)),
    "broadcast": (lambda a, b: a @ b, (2, 3, 4, 5), (5, 6)),
    "vectors": (lambda a, b: a @ b, (33,), (33,)),
    "matrix and vector": (lambda a, b: a.t() @ b, (33, 4), (33,)),
    "outer": (torch.outer, (5,), (7,)),
    "one column": (lambda a, b: a @ b, (9, 1), (1, 9)),
    "linear": (F.linear, (6, 20), (8, 20)),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->ibk", a, b), (3, 4, 5), (3, 6, 5)),
    "convolution": (lambda a, b: F.conv2d(a, b, padding=1), (2, 3, 9, 9), (4, 3, 3, 3)),
    "grouped convolution": (lambda a, b: F.conv1d(a, b, groups=2), (2, 4, 11), (6, 2, 3)),
    "transposed convolution": (
        lambda a, b: F.conv_transpose2d(a, b, stride=2),
        (2, 3, 5, 5),
        (3, 4, 3, 3),
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", PRODUCTS)
def test_products_and_their_gradients(case, dtype):
    compute, *shapes = PRODUCTS[case]
    g = torch.Generator().manual_seed(0)
    here = [torch.randn(s, generator=g).to(dtype).requires_grad_() for s in shapes]
    there = [t.detach().to("tpu").requires_grad_() for t in here]
    expected, result = compute(*here), compute(*there)
    # One rounding of the sum, where the CPU may round parts of it.
    tolerance = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(result.cpu(), expected, **tolerance)
    for y in (expected, result):
        y.float().sum().backward()
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(b.grad.cpu(), a.grad, **tolerance)
