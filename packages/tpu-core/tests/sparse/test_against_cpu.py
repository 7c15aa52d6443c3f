"""Sparse tensors of device ``tpu``: PyTorch's results on the CPU."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tpu_core.errors import FallbackWarning
from tpu_core.metrics import METRICS

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:.*(beta state|invariant)"),
]

INDICES = torch.tensor([[0, 1, 1, 0], [2, 0, 2, 2]])
UNCOALESCED = torch.sparse_coo_tensor(INDICES, torch.tensor([3.0, 4, -5, 6]), (2, 3))
COALESCED = UNCOALESCED.coalesce()
HYBRID = torch.sparse_coo_tensor(INDICES, torch.arange(8.0).reshape(4, 2) - 3, (2, 3, 2))
CSR = COALESCED.to_sparse_csr()
CSC = COALESCED.to_sparse_csc()
COO = {"uncoalesced": UNCOALESCED, "coalesced": COALESCED, "hybrid": HYBRID}
ALL = COO | {"csr": CSR, "csc": CSC}
MATRIX = torch.arange(15.0).reshape(3, 5) / 7 - 1
DENSE = torch.arange(6.0).reshape(2, 3) - 2.5
Function = Callable[..., Any]


def assert_same(f: Function, *args: Tensor) -> None:
    """``f`` of ``args`` on the device has the results of the CPU: layout, dtype, values."""
    expected = f(*[x.clone() for x in args])
    found = f(*[x.clone().to("tpu") for x in args])
    several = isinstance(expected, tuple)
    for e, r in zip(expected, found, strict=True) if several else [(expected, found)]:
        if not isinstance(e, Tensor):
            assert r == e
            continue
        assert (r.layout, r.dtype, r.shape, r.device.type) == (e.layout, e.dtype, e.shape, "tpu")
        # Sums of uncoalesced tensors keep all elements, as on CUDA.
        dense = [x if x.layout == torch.strided else x.to_dense() for x in (r.cpu(), e)]
        torch.testing.assert_close(*dense, equal_nan=True)


UNARY: dict[str, Function] = {
    name: (lambda x, name=name: getattr(x, name)())
    for name in "abs neg sin sqrt relu sgn log1p ceil isnan tanh clone to_dense double sum".split()
}
ELEMENTWISE: dict[str, Function] = UNARY | {
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "bool": lambda x: x.bool(),
    "twice": lambda x: x * 2,
    "in place": lambda x: x.mul_(3),
    "zeros": torch.zeros_like,
    "row": lambda x: x[0],
    "transpose": lambda x: x.transpose(0, 1),
    "nnz": lambda x: x._nnz(),
    "deepcopy": lambda x: x if x.layout != torch.sparse_coo else copy.deepcopy(x),
}
OF_COO: dict[str, Function] = {
    "coalesce": lambda x: (x.coalesce(), x.coalesce().indices(), x.coalesce().values()),
    "flag": lambda x: (x.is_coalesced(), x.coalesce().is_coalesced()),
    "to_sparse": lambda x: x.to_dense().to_sparse(),
    "to_sparse(1)": lambda x: x.to_dense().to_sparse(1),
    "half": lambda x: x / 2,
    "power": lambda x: x**2,
    "floor": lambda x: x // 2,
    "rounded": lambda x: torch.div(x, 2, rounding_mode="trunc"),
    "sum of itself": lambda x: x + x,
    "difference": lambda x: x - x * 0.5,
    "product": lambda x: x * x,
    "add_": lambda x: x.add_(x, alpha=2),
    "zero_": lambda x: x.zero_(),
    "norm": lambda x: x.norm(),
    "sum over a dim": lambda x: torch.sparse.sum(x, 0),
    "cat": lambda x: torch.cat([x, x]),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "narrow_copy": lambda x: x.narrow_copy(1, 1, 2),
    "mask": lambda x: x.sparse_mask(x.coalesce()),
    "dense + sparse": lambda x: torch.ones(x.shape, device=x.device) + x,
    "dense.add_": lambda x: torch.ones(x.shape, device=x.device).add_(x, alpha=-0.5),
    "empty + sparse": lambda x: torch.zeros_like(x) + x,
}
PRODUCTS: dict[str, Function] = {
    "@": lambda s, d: s @ d,
    "sparse.mm": torch.sparse.mm,
    "addmm": lambda s, d: torch.addmm(torch.ones(2, 5).to(d.device), s, d, beta=0.5, alpha=2),
    "addmm_": lambda s, d: torch.ones(2, 5).to(d.device).addmm_(s, d),
    "vector": lambda s, d: s @ d[:, 0],
    "dense @ sparse": lambda s, d: d.T @ s.t(),
}
WITH_DENSE: dict[str, Function] = {
    "sparse * dense": lambda s, d: s * d,
    "dense * sparse": lambda s, d: d * s,
    "dense - sparse": lambda s, d: d - s,
    "sparse_mask": lambda s, d: d.sparse_mask(s.coalesce()),
}


@pytest.mark.parametrize("layout", ALL)
def test_elementwise(layout: str) -> None:
    before = METRICS.snapshot()["fallbacks"]
    for f in ELEMENTWISE.values():
        assert_same(f, ALL[layout])
    assert METRICS.snapshot()["fallbacks"] == before


@pytest.mark.parametrize("layout", COO)
def test_coordinates(layout: str) -> None:
    before = METRICS.snapshot()["fallbacks"]
    for f in OF_COO.values():
        assert_same(f, COO[layout])
    assert METRICS.snapshot()["fallbacks"] == before


@pytest.mark.parametrize("layout", ["uncoalesced", "coalesced", "csr"])
def test_products(layout: str) -> None:
    before = METRICS.snapshot()["fallbacks"]
    for f in PRODUCTS.values():
        assert_same(f, ALL[layout], MATRIX)
    assert METRICS.snapshot()["fallbacks"] == before


@pytest.mark.parametrize("layout", ["uncoalesced", "coalesced"])
def test_with_dense(layout: str) -> None:
    for f in WITH_DENSE.values():
        assert_same(f, COO[layout], DENSE)
    other = torch.sparse_coo_tensor(torch.tensor([[1, 0], [2, 1]]), torch.tensor([2.0, 3]), (2, 3))
    for sparse in (other, other.coalesce(), other.long(), other * 0):
        assert_same(lambda a, b: (a * b, a + b, a.sparse_mask(b.coalesce())), COO[layout], sparse)


def test_product_in_place_leaves_values_that_were_taken() -> None:
    def product(x: Tensor) -> tuple[Tensor, bool, Tensor]:
        values = x._values()
        return x.mul_(3), x.is_coalesced(), values

    assert_same(product, COALESCED)
    with pytest.raises(RuntimeError):
        COALESCED.long().to("tpu").mul_(0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.complex64])
def test_rows(dtype: torch.dtype) -> None:
    """Updates of some rows, as optimizers make them of gradients of embeddings."""
    values = (torch.arange(8.0).reshape(4, 2) - 3).to(dtype)
    rows = torch.sparse_coo_tensor(torch.tensor([[3, 0, 3, 1]]), values, (5, 2))
    table = (torch.arange(10.0).reshape(5, 2) - 2).to(dtype)
    for sparse in (rows, rows.coalesce(), rows.coalesce() * 0):
        assert_same(lambda d, s: (d.add_(s), d.add_(s, alpha=-3)), table, sparse)
        assert_same(lambda d, s: d.add_(s, alpha=-1.5), table, sparse)
        assert_same(lambda d, s: (d + s, d.sparse_mask(s)), table, sparse)


def test_first_op_is_no_fallback() -> None:
    program = """
import torch
table = torch.ones(4, 2, device="tpu", requires_grad=True)
torch.nn.functional.embedding(torch.tensor([1, 3]).to("tpu"), table, sparse=True).sum().backward()
assert table.grad.layout == torch.sparse_coo and torch.tpu.metrics()["fallbacks"] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_first_compressed_ops_of_a_process() -> None:
    """ATen has kernels of some for all backends, which none of ours must be late for."""
    program = """
import torch

x = torch.tensor([[1.0, -0.25, 0], [0, 4, 0.5]]).to_sparse_csr()
for name in ("neg", "abs", "sin", "trunc"):
    y = getattr(x.to("tpu"), name)()
    assert y.layout == torch.sparse_csr
    torch.testing.assert_close(y.cpu().to_dense(), getattr(x, name)().to_dense())
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=300)


def test_batched_product() -> None:
    batch = torch.arange(24.0).reshape(2, 3, 4).fmod(5).relu().to_sparse()
    assert_same(torch.bmm, batch, torch.arange(16.0).reshape(2, 4, 2))


def test_conversions() -> None:
    for name in ("to_sparse_csr", "to_sparse_csc"):
        assert_same(lambda x, name=name: getattr(x, name)(), COALESCED)
        assert_same(lambda x, name=name: getattr(x, name)(), DENSE)
    assert_same(lambda x: x.to_sparse(), CSR)
    assert_same(lambda x: (x.crow_indices(), x.col_indices(), x.values()), CSR)
    assert_same(lambda x: x.to_sparse_bsr((2, 2)), torch.eye(4))


def test_made_from_parts() -> None:
    crow, col, values = CSR.crow_indices(), CSR.col_indices(), CSR.values()
    assert_same(lambda c, k, v: torch.sparse_csr_tensor(c, k, v, (2, 3)), crow, col, values)
    assert_same(torch.sparse_coo_tensor, INDICES, UNCOALESCED._values())
    none = torch.zeros(0, 2, dtype=torch.long)
    assert_same(lambda i, v: torch.sparse_coo_tensor(i, v, ()), none, torch.tensor([1.0, 2]))
    assert torch.sparse_coo_tensor(size=(2, 3), device="tpu").to_dense().sum().item() == 0
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        torch.sparse_coo_tensor(
            INDICES.to("tpu"), torch.ones(4, device="tpu"), (2, 2), check_invariants=True
        )


def test_gradients() -> None:
    def product(s: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        s, d = s.requires_grad_(), d.requires_grad_()
        (torch.sparse.mm(s, d) ** 2).sum().backward()
        assert s.grad is not None and d.grad is not None
        return s.grad, d.grad

    def dense(s: Tensor) -> Tensor | None:
        (s.requires_grad_().to_dense() ** 3).sum().backward()
        return s.grad

    def values(x: Tensor) -> Tensor | None:
        x.requires_grad_().to_sparse().coalesce().values().pow(2).sum().backward()
        return x.grad

    assert_same(product, COALESCED, MATRIX)
    assert_same(dense, COALESCED)
    assert_same(values, torch.eye(3))


def test_printed_saved_and_loaded() -> None:
    for x in (UNCOALESCED, CSR):
        there = x.to("tpu")
        assert "".join(str(there).replace("device='tpu:0', ", "").split()).replace(
            ",device='tpu:0'", ""
        ) == "".join(str(x).split())
        file = io.BytesIO()
        torch.save(there, file)
        file.seek(0)
        loaded = torch.load(file)
        assert loaded.device.type == "tpu" and torch.equal(loaded.to_dense().cpu(), x.to_dense())


def test_cpu_kernels_are_counted() -> None:
    METRICS.reset()
    with pytest.warns(FallbackWarning, match="sparse tensors runs on the CPU"):
        found = torch.sparse.softmax(COALESCED.to("tpu"), 1)
    expected = torch.sparse.softmax(COALESCED, 1)
    torch.testing.assert_close(found.to_dense().cpu(), expected.to_dense())
    assert METRICS.snapshot()["fallbacks"] == 1


def test_wrong_calls_raise_the_errors_of_the_cpu() -> None:
    calls: list[Function] = [
        lambda s: s + torch.ones(2, 3, device=s.device),
        lambda s: s + s.transpose(0, 1),
        lambda s: torch.ones(3, 3, device=s.device) + s,
        lambda s: s @ torch.ones(2, 2, device=s.device),
        lambda s: s + 1,
        lambda s: s.indices(),
        lambda s: torch.ones(2, 3, device=s.device).add_(s, alpha=1j),
        lambda s: torch.ones(2, 3, device=s.device).int().add_(s),
        lambda s: torch.ones(2, 4, device=s.device).sparse_mask(s),
    ]
    for call in calls:
        with pytest.raises(RuntimeError) as expected:
            call(UNCOALESCED)
        with pytest.raises(RuntimeError) as found:
            call(UNCOALESCED.to("tpu"))
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


@pytest.mark.parametrize("reduce", ["mean", "amax"])
@pytest.mark.filterwarnings("ignore:.*runs on the CPU")
def test_gradients_of_reduced_products(reduce: str) -> None:
    def gradients(s: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        s, d = s.requires_grad_(), d.requires_grad_()
        product = torch.sparse.mm(s, d, reduce)
        product.sum().backward()
        assert s.grad is not None and d.grad is not None
        return product.detach(), s.grad, d.grad

    assert_same(gradients, CSR, MATRIX)
