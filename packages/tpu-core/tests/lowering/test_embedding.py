"""Embeddings and embedding bags, against the CPU."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tpu_core.dtypes import to_numpy_dtype
from tpu_core.lowering import embedding  # noqa: F401
from tpu_core.lowering.evaluate import call_lowering, to_jax, to_torch, weak
from tpu_core.lowering.registry import REGISTRY

from .harness import CompareLowerings, check_opinfo

aten = torch.ops.aten


def test_opinfo():
    mode = check_opinfo("nn.functional.embedding", (torch.float32, torch.float64))
    more = check_opinfo("nn.functional.embedding", (torch.bfloat16,), grad=False)
    assert not mode.failures + more.failures
    assert {"aten.embedding.default", "aten.embedding_dense_backward.default"} <= mode.seen


@pytest.mark.parametrize("padding_idx", [-1, 0, 3])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 4)])
def test_dense_backward(padding_idx, scale, shape):
    index = torch.randint(0, 5, shape)
    with CompareLowerings() as mode:
        aten.embedding_dense_backward(torch.randn(*shape, 6), index, 5, padding_idx, scale)
    assert not mode.failures


def run(op, args, shapes, dtypes):
    out = tuple(jax.ShapeDtypeStruct(tuple(s), to_numpy_dtype(d)) for s, d in zip(shapes, dtypes))
    with jax.enable_x64(True):
        args = tuple(to_jax(a) if isinstance(a, torch.Tensor) else a for a in args)
        return [to_torch(r) for r in call_lowering(REGISTRY.get(op), args, {}, out)]


def test_bfloat16_gradient_is_summed_in_float32():
    grad = torch.randn(50, 3).bfloat16()
    index = torch.randint(0, 4, (50,))
    want = aten.embedding_dense_backward(grad.float(), index, 4, -1, False).bfloat16()
    op = "aten.embedding_dense_backward.default"
    (got,) = run(op, (grad, index, 4, -1, False), [(4, 3)], [torch.bfloat16])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_bag(mode, padding_idx, include_last, weighted):
    """The side results that the CPU leaves unset are checked through the gradients."""
    if weighted and mode != "sum":
        return
    weight = torch.randn(6, 4, requires_grad=True)
    index = torch.tensor([0, 2, 1, 2, 2, 5, 5, 3])
    offsets = torch.tensor([0, 3, 3, 5, 8] if include_last else [0, 3, 3, 5])  # bag 1 is empty
    samples = torch.randn(8, requires_grad=True) if weighted else None
    want = F.embedding_bag(
        index, weight, offsets, mode=mode, per_sample_weights=samples,
        include_last_offset=include_last, padding_idx=padding_idx,
    )  # fmt: skip
    grad = torch.randn_like(want)
    want.backward(grad)

    number, pad = ["sum", "mean", "max"].index(mode), -1 if padding_idx is None else padding_idx
    widest = (4, 4) if mode == "max" else (0,)
    for op in ("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default"):
        got, bag, size, best = run(
            op,
            (weight, index, offsets, False, number, False, samples, include_last, pad),
            [(4, 4), index.shape, offsets.shape, widest],  # as the meta function says
            [torch.float32] + [torch.int64] * 3,
        )
        torch.testing.assert_close(got, want.detach())
    side = (bag, size, best)
    (dw,) = run(
        "aten._embedding_bag_backward.default",
        (grad, index, offsets, *side, 6, False, number, False, samples, pad),
        [(6, 4)],
        [torch.float32],
    )
    torch.testing.assert_close(dw, weight.grad)
    if weighted:
        (ds,) = run(
            "aten._embedding_bag_per_sample_weights_backward.default",
            (grad, weight, index, offsets, bag, number, pad),
            [(8,)],
            [torch.float32],
        )
        torch.testing.assert_close(ds, samples.grad)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_renorm(norm_type):
    weight = torch.randn(6, 4).mul(3)
    index = torch.tensor([[0, 2], [2, 5]])
    want = aten.embedding_renorm_(weight.clone(), index, 1.5, norm_type)
    with jax.enable_x64(True):
        limit = weak(1.5)
    op = "aten.embedding_renorm.default"
    (got,) = run(op, (weight, index, limit, norm_type), [(6, 4)], [torch.float32])
    torch.testing.assert_close(got, want)


def test_no_float64():
    with jax.enable_x64(True):
        table, index = np.ones((5, 3), np.float32), np.zeros((2, 2), np.int64)
        grad = np.ones((2, 2, 3), np.float32)
        text = (
            jax.jit(lambda g, i: embedding.embedding_dense_backward(g, i, 5, 1, True))
            .lower(grad, index)
            .as_text()
            + jax.jit(embedding.embedding).lower(table, index).as_text()
        )
    assert "f64" not in text
