"""Indexing, gathering and scattering by tensors, against the CPU."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from tpu_core.lowering import indexing, scatter, slicing  # noqa: F401
from tpu_core.lowering.evaluate import to_jax, to_torch

from .harness import CompareLowerings, check_opinfo

aten = torch.ops.aten

OPINFO = {
    "__getitem__": ["index.Tensor", "index_put.default", "select_backward.default"],
    "index_select": ["index_select.default", "index_add.default"],
    "index_add": ["index_add.default"],
    "index_copy": ["index_copy.default", "index_fill.int_Scalar"],
    "index_fill": ["index_fill.int_Scalar", "index_fill.int_Tensor"],
    "index_reduce": ["index_reduce.default"],
    "take": ["take.default", "put.default"],
    "put": ["put.default"],
    "gather": ["gather.default", "scatter_add.default"],
    "take_along_dim": ["gather.default"],
    "masked_scatter": ["masked_scatter.default", "masked_scatter_backward.default"],
    "select": ["select_backward.default"],
    "slice": ["slice_backward.default"],
    "select_scatter": ["select_scatter.default"],
    "slice_scatter": ["slice_scatter.default"],
    "diagonal_scatter": ["diagonal_scatter.default"],
    "diagonal_copy": ["diagonal_backward.default"],
    "as_strided_scatter": ["as_strided_scatter.default"],
    "scatter": ["scatter.src", "scatter.value"],
    "scatter_add": ["scatter_add.default"],
    "scatter_reduce": ["scatter_reduce.two"],
    "nonzero_static": ["nonzero_static.default"],
}


@pytest.mark.parametrize("name", OPINFO)
def test_opinfo(name):
    mode = check_opinfo(name, (torch.float32,), samples=3)
    others = (torch.bfloat16, torch.int64, torch.bool, torch.complex64)
    more = check_opinfo(name, others, samples=1, grad=False)
    assert not mode.failures + more.failures
    assert {f"aten.{o}" for o in OPINFO[name]} <= mode.seen | more.seen


def compare(op, *args, **kwargs):
    with CompareLowerings() as mode:
        op(*args, **kwargs)
    assert not mode.failures, mode.failures
    assert mode.seen


X = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
I = torch.tensor([[1, -1], [0, 1]])
J = torch.tensor([2, -3])


@pytest.mark.parametrize(
    "indices",
    [
        [I],
        [None, J],
        [I, J],
        [None, None, I, J],
        [I, None, J],  # not adjacent: the indices' dimensions come first
        [None, I, None, J],
        [None, None, None, I.int()],
        [torch.tensor(1)],
        [torch.empty(0, dtype=torch.long)],
        [None, torch.empty(2, 0, dtype=torch.long), I[:, :1]],
    ],
)
def test_index_and_index_put(indices):
    compare(aten.index.Tensor, X, indices)
    compare(aten._unsafe_index.Tensor, X, indices)
    values = torch.randn_like(X[tuple(slice(None) if i is None else i.long() for i in indices)])
    for accumulate in (False, True):
        # Duplicates only where they add up; a plain write of duplicates has no defined winner.
        if accumulate or not any(i is not None and torch.equal(i.long(), I) for i in indices):
            compare(aten.index_put.default, X, indices, values, accumulate)
        compare(aten._index_put_impl.default, X, indices, torch.tensor(3.0), accumulate)
        compare(aten._unsafe_index_put.default, X, indices, torch.tensor([3.0]), accumulate)


MASK = torch.tensor([[True, False, True], [False, True, False]])


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("indices", "values"),
    [
        ([MASK], torch.tensor(2.0)),
        ([MASK], torch.randn(1, 4, 5)),
        ([MASK], torch.randn(5)),
        ([MASK], torch.randn(3, 4, 5)),  # one value for each true element
        ([MASK.byte()], torch.randn(3, 4, 5)),
        ([None, MASK.T], None),
        ([None, torch.tensor([True, False, True])], torch.randn(2, 1, 5)),
        ([None, torch.tensor([True, False, True])], torch.randn(2, 2, 4, 5)),
        ([torch.zeros(2, dtype=torch.bool)], torch.tensor(1.0)),
        ([X > 30], torch.tensor(0.0)),
        ([MASK, torch.tensor(1)], torch.tensor(4.0)),
        ([MASK, torch.tensor([0, 1, 2])], torch.randn(3, 5)),
        ([torch.tensor([True, False]), None, torch.tensor([3])], torch.tensor(4.0)),
    ],
)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_index_put_by_mask(indices, values, accumulate):
    x = X
    if values is None:
        x, values = torch.randn(2, 3, 2), torch.tensor(-1.0)
    compare(aten.index_put.default, x, indices, values, accumulate)


def test_index_by_mask_is_refused():
    with jax.enable_x64(True), pytest.raises(TypeError, match="data-dependent"):
        indexing.index(to_jax(X), [to_jax(MASK)])


def test_0d_and_empty():
    zero = torch.tensor(3.0)
    one = torch.tensor([0])
    compare(aten.gather.default, zero, 0, one)
    compare(aten.gather.default, X, 1, torch.empty(0, 3, 4, 5, dtype=torch.long))
    compare(aten.scatter.src, zero, 0, one, torch.tensor([2.0]))
    compare(aten.scatter.value, zero, 0, torch.tensor(0), 2.0)
    compare(aten.index_add.default, zero, 0, one, torch.tensor(2.0))
    compare(aten.index_select.default, zero, 0, one)
    compare(aten.index_fill.int_Scalar, zero, 0, one, 2.0)
    compare(aten.take.default, zero, one)
    compare(aten.put.default, zero, one, torch.tensor([1.0]))
    compare(aten.index_select.default, torch.empty(0, 3), 1, torch.tensor([2, 0]))
    compare(aten.nonzero_static.default, torch.tensor(1), size=2)
    compare(aten.nonzero_static.default, torch.empty(0, 2), size=3, fill_value=7)


@pytest.mark.parametrize(("rows", "width", "indices"), [(5, 3, 0), (0, 3, 0), (5, 0, 2)])
def test_calls_with_an_empty_index(rows, width, indices):
    def results(device):
        x = torch.zeros(rows, width, device=device)
        index = torch.zeros(indices, dtype=torch.long, device=device)
        source = torch.ones(indices, width, device=device)
        added = x.index_add(0, index, source, alpha=2)
        reduced = x.index_reduce(0, index, source, "amax")
        return [r.cpu() for r in (added, reduced, x.clone().index_add_(0, index, source))]

    for got, want in zip(results("tpu"), results("cpu")):
        assert torch.equal(got, want)


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_scatter_reduce_with_duplicates(reduce, include_self):
    index = torch.randint(0, 4, (6, 5, 3))
    for x in (torch.randn(7, 4, 5), torch.randint(-9, 9, (7, 4, 5))):
        src = torch.randn(6, 6, 4).mul(5).to(x.dtype)
        compare(aten.scatter_reduce.two, x, 1, index, src, reduce, include_self=include_self)
    x = torch.randn(7, 4)
    x[2, 1] = torch.nan
    src = torch.randn(7, 5)
    src[1, 1] = torch.nan
    index = torch.randint(0, 4, (7, 5))
    compare(aten.scatter_reduce.two, x, 1, index, src, reduce, include_self=include_self)
    if reduce != "sum":
        along = torch.tensor([3, 0, 3, 1, 3])
        compare(aten.index_reduce.default, x, 1, along, src, reduce, include_self=include_self)


def test_scatter_of_one_index_is_elementwise():
    """One index a row (one_hot, the gradient of a loss) needs no scatter."""
    index = torch.tensor([[2], [0], [1]])
    compare(aten.scatter.value, torch.zeros(3, 4, dtype=torch.long), 1, index, 1)
    compare(aten.scatter_add.default, torch.randn(3, 4), 1, index, torch.randn(3, 2))
    compare(aten.scatter.reduce, torch.randn(3, 4), 1, index, torch.randn(3, 1), reduce="multiply")
    with jax.enable_x64(True):
        args = to_jax(torch.randn(3, 4)), to_jax(index), to_jax(torch.randn(3, 1))
        text = jax.jit(lambda x, i, s: scatter.scatter_add(x, 1, i, s)).lower(*args).as_text()
    assert "stablehlo.scatter" not in text


def test_16_bit_sums_are_wide():
    """256 + 1 is 256 in bfloat16, so a sum of many ones in it would stop there."""
    with jax.enable_x64(True):
        ones = to_jax(torch.ones(1000, dtype=torch.bfloat16))
        index = to_jax(torch.zeros(1000, dtype=torch.long))
        start = to_jax(torch.zeros(3, dtype=torch.bfloat16))
        assert to_torch(scatter.scatter_add(start, 0, index, ones))[0] == 1000
        assert to_torch(scatter.index_add(start, 0, index, ones))[0] == 1000
        assert to_torch(indexing.index_put(start, [index], ones, True))[0] == 1000


def test_invalid_indices_neither_crash_nor_write():
    with jax.enable_x64(True):
        x = to_jax(torch.arange(4.0))
        bad = to_jax(torch.tensor([7, -9]))
        for read in (indexing.index(x, [bad]), indexing.gather(x, 0, bad)):
            assert torch.isin(to_torch(read), torch.arange(4.0)).all()
        ones = to_jax(torch.ones(2))
        for written in (
            indexing.index_put(x, [bad], ones),
            scatter.scatter(x, 0, bad, ones),
            scatter.index_add(x, 0, bad, ones),
            indexing.put(x, bad, ones),
        ):
            assert torch.equal(to_torch(written), torch.arange(4.0))


def test_unsafe_masked_index():
    index = [None, torch.tensor([0, 5, -7, 2])]
    mask = torch.tensor([True, False, False, True])
    x = torch.randn(3, 4)
    compare(aten._unsafe_masked_index.default, x, mask, index, 1.5)
    compare(aten._unsafe_masked_index_put_accumulate.default, x, mask, index, torch.randn(3, 4))


def test_slices_with_steps_and_offsets():
    x = torch.randn(4, 9)
    for bounds in ((1, 8, 3), (-8, 100, 2), (5, 2, 1), (None, None, 1), (0, 9, 4)):
        part = torch.randn_like(x[:, slice(*bounds)])
        compare(aten.slice_scatter.default, x, part, 1, *bounds)
        start, end, step = bounds[0] or 0, 9 if bounds[1] is None else bounds[1], bounds[2]
        compare(aten.slice_backward.default, part, [4, 9], 1, start, end, step)
    for offset in (-3, 0, 2, 8, 12):
        part = torch.randn_like(x.diagonal(offset))
        compare(aten.diagonal_scatter.default, x, part, offset, -2, -1)
        compare(aten.diagonal_backward.default, part, [4, 9], offset, 0, 1)
    y = torch.randn(3, 2, 4)
    compare(aten.diagonal_backward.default, torch.randn(2, 3), [3, 2, 4], 1, 0, 2)
    compare(aten.diagonal_backward.default, torch.randn(2, 3), [3, 2, 4], -1, 2, 0)
    compare(aten.select_backward.default, torch.randn(3, 4), [3, 2, 4], 1, -1)
    compare(aten.select_scatter.default, y, torch.randn(3, 4), -2, -2)
    compare(aten.slice_backward.default, torch.empty(4, 0), [4, 9], 1, 9, 9, 1)


@pytest.mark.parametrize("op", ["index", "gather", "scatter_add", "index_put"])
def test_no_float64_in_float32_programs(op):
    with jax.enable_x64(True):
        x, i = np.ones((4, 5), np.float32), np.zeros((2, 3), np.int64)
        src = np.ones((2, 3), np.float32)
        fn = {
            "index": lambda x, i, s: indexing.index(x, [None, i]),
            "gather": lambda x, i, s: indexing.gather(x, 1, i),
            "scatter_add": lambda x, i, s: scatter.scatter_add(x, 1, i, s),
            "index_put": lambda x, i, s: indexing.index_put(x, [i], s[0, 0], True),
        }[op]
        assert "f64" not in jax.jit(fn).lower(x, i, src).as_text()
