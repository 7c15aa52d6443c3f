"""Joining, repeating, reordering, windows and the copies of views, against the CPU."""

from __future__ import annotations

import pytest
import torch

from tpu_core.lowering import concat, view_copies, windows  # noqa: F401

from .harness import CompareLowerings, check_opinfo

aten = torch.ops.aten

OPINFO = {
    "cat": ["cat.default"],
    "stack": ["stack.default"],
    "block_diag": ["block_diag.default"],
    "repeat": ["repeat.default"],
    "roll": ["roll.default"],
    "flip": ["flip.default"],
    "rot90": ["rot90.default"],
    "nn.functional.pixel_shuffle": ["pixel_shuffle.default", "pixel_unshuffle.default"],
    "nn.functional.channel_shuffle": ["channel_shuffle.default"],
    "unfold": ["unfold_backward.default"],
    "unfold_copy": ["unfold_copy.default"],
    "view_copy": ["view_copy.default"],
    "expand_copy": ["expand_copy.default"],
    "permute_copy": ["permute_copy.default"],
    "transpose_copy": ["transpose_copy.int"],
    "t_copy": ["t_copy.default"],
    "squeeze_copy": ["squeeze_copy.default", "squeeze_copy.dim"],
    "unsqueeze_copy": ["unsqueeze_copy.default"],
    "unbind_copy": ["unbind_copy.int"],
    "split_with_sizes_copy": ["split_with_sizes_copy.default"],
    "alias_copy": ["alias_copy.default"],
    "narrow_copy": ["narrow_copy.default"],
    "diagonal_copy": ["diagonal_copy.default"],
    "as_strided_copy": ["as_strided_copy.default"],
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


def test_cat_promotes_and_skips_legacy_empties():
    compare(aten.cat.default, [torch.empty(0), torch.randn(2, 3), torch.randn(2, 1)], -1)
    compare(aten.cat.default, [torch.ones(2), torch.ones(2, dtype=torch.long)])
    compare(aten.cat.default, [torch.ones(2).half(), torch.ones(2).bfloat16()])
    compare(aten.cat.default, [torch.empty(0), torch.empty(0)])
    compare(aten.stack.default, [torch.tensor(1), torch.tensor(2.5)])
    compare(aten.stack.default, [torch.randn(0, 2)] * 3, -1)


def test_chunk_cat():
    parts = [torch.randn(4, 3), torch.randn(5, 2, 2), torch.randn(1, 7)]
    compare(aten._chunk_cat.default, parts, 0, 3)
    compare(aten._chunk_cat.default, [torch.randn(2, 5), torch.randn(2, 4, 3)], 1, 4)


def test_repeat_and_roll():
    x = torch.randn(2, 1, 3)
    for repeats in ([2, 3, 4], [4, 1, 1, 2], [1, 5, 1], [0, 1, 1], [1, 1, 1]):
        compare(aten.repeat.default, x, repeats)
    compare(aten.repeat.default, torch.tensor(2.0), [3])
    compare(aten.repeat.default, torch.tensor(2.0), [])
    compare(aten.roll.default, x, [5, -1], [2, 0])
    compare(aten.roll.default, x, [4])
    compare(aten.flip.default, torch.tensor(1.0), [])
    repeats = torch.tensor([2, 0, 3, 1])
    compare(aten.repeat_interleave.Tensor, repeats, output_size=6)
    compare(aten.repeat_interleave.Tensor, repeats.int(), output_size=6)
    compare(aten.repeat_interleave.Tensor, torch.zeros(2, dtype=torch.long), output_size=0)
    compare(aten.block_diag.default, [torch.tensor(1.0), torch.randn(3), torch.randn(2, 2)])


@pytest.mark.parametrize(
    ("kernel", "stride"), [((2, 3), (1, 2)), ((3, 3), (3, 3)), ((1, 18), (1, 1))]
)
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
def test_im2col_and_col2im(kernel, stride, dilation):
    x = torch.randn(2, 3, 9, 21)
    compare(aten.im2col.default, x, kernel, dilation, (1, 2), stride)
    compare(aten.im2col.default, x[0], kernel, dilation, (0, 0), stride)
    columns = aten.im2col(x, kernel, dilation, (1, 2), stride)
    compare(aten.col2im.default, columns, [9, 21], kernel, dilation, (1, 2), stride)
    compare(aten.col2im.default, columns[0], [9, 21], kernel, dilation, (1, 2), stride)


@pytest.mark.parametrize(("size", "step"), [(3, 1), (3, 3), (2, 5), (20, 1), (1, 1)])
def test_unfold(size, step):
    x = torch.randn(2, 23, 3)
    compare(aten.unfold_copy.default, x, 1, size, step)
    grad = torch.randn_like(x.unfold(1, size, step))
    compare(aten.unfold_backward.default, grad, [2, 23, 3], 1, size, step)
    compare(aten.unfold_backward.default, torch.randn(1), [], 0, 1, 1)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.int32),
        (torch.float32, torch.uint8),
        (torch.uint8, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.complex64, torch.float32),
        (torch.float32, torch.complex64),
        (torch.complex64, torch.int64),
        (torch.bool, torch.uint8),
        (torch.int32, torch.int32),
    ],
)
def test_view_as_dtype(source, target):
    x = torch.randint(0, 2, (2, 8)).to(source)
    compare(aten.view_copy.dtype, x, target)


def test_copies_of_views():
    x = torch.randn(3, 4, 5)
    compare(aten.slice_copy.Tensor, x, 1, -3, 100, 2)
    compare(aten.slice_copy.Tensor, x, 1, 3, 1)
    compare(aten.select_copy.int, x, -1, -2)
    compare(aten.narrow_copy.default, x, 1, 4, 0)
    compare(aten.split_copy.Tensor, x, 3, 2)
    compare(aten.squeeze_copy.dims, x[:, :1], [1])
    compare(aten.detach_copy.default, x)
    compare(aten.lift_fresh_copy.default, x)
    compare(aten._reshape_copy.default, x, [12, 5])
    compare(aten._neg_view_copy.default, x)
    z = torch.randn(3, 2, dtype=torch.complex64)
    compare(aten._conj_copy.default, z)
    compare(aten.view_as_real_copy.default, z)
    compare(aten.view_as_complex_copy.default, torch.randn(3, 2))
    compare(aten.transpose_copy.int, torch.tensor(1.0), 0, -1)
    compare(aten.permute_copy.default, x, [2, -3, 1])
    compare(aten.diagonal_copy.default, x, -1, 2, 0)
