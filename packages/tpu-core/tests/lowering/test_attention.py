"""Fused attention and its gradient against PyTorch's own composite attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tpu_core.dtypes import to_numpy_dtype
from tpu_core.lowering import attention  # noqa: F401
from tpu_core.lowering.evaluate import call_lowering, to_jax, to_torch
from tpu_core.lowering.registry import REGISTRY

FORWARD = "aten._scaled_dot_product_fused_attention_overrideable.default"
BACKWARD = "aten._scaled_dot_product_fused_attention_overrideable_backward.default"


def _aval(shape: tuple[int, ...], dtype: torch.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), to_numpy_dtype(dtype))


def _run(q, k, v, bias, grad, p=0.0, causal=False, scale=None) -> tuple[Any, list[Any]]:
    """Forward and backward through the registry's two entries."""
    b, h = (1, q.shape[0]) if q.dim() == 3 else q.shape[:2]
    shape = (*q.shape[:-1], v.shape[-1])
    out = (
        _aval(shape, q.dtype), _aval((b, h, q.shape[-2]), torch.float32), None, None, None, None,
        _aval((), torch.int64), _aval((), torch.int64), None,
    )  # fmt: skip
    with jax.enable_x64(True):
        operands = [None if t is None else to_jax(t) for t in (q, k, v, bias)]
        key = jnp.array([3, 4], np.uint32)
        kwargs = {} if scale is None else {"scale": scale}
        got = call_lowering(REGISTRY.get(FORWARD), (*operands, p, causal, False), kwargs, out, key)
        tensors = (q, k, v, bias)
        mask = [True, True, True, bias is not None and bias.requires_grad]
        expected = tuple(
            None if t is None or not m else _aval(t.shape, t.dtype) for t, m in zip(tensors, mask)
        )
        args = (
            to_jax(grad), *operands, mask, got[0], got[1], None, None, q.shape[-2], k.shape[-2],
            p, causal, got[6], got[7],
        )  # fmt: skip
        grads = call_lowering(REGISTRY.get(BACKWARD), args, kwargs, expected)
    return to_torch(got[0]), [None if g is None else to_torch(g) for g in grads]


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "causal, more queries than keys": {"causal": True, "lengths": (7, 4)},
    "scale": {"scale": 0.3},
    "bias": {"bias": (2, 1, 5, 6), "lengths": (5, 6)},
    "bias over rows": {"bias": (1, 6), "lengths": (5, 6)},
    "grouped queries": {"heads": (6, 2)},
    "three dims": {"dims": 3},
    "wide values": {"value": 9},
    "no batch": {"batch": 0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_matches_composite(case: str, dtype: torch.dtype) -> None:
    options = dict(CASES[case])
    lengths, heads = options.pop("lengths", (5, 5)), options.pop("heads", (3, 3))
    batch, width = options.pop("batch", 2), options.pop("value", 8)
    bias_shape, dims = options.pop("bias", None), options.pop("dims", 4)
    torch.manual_seed(0)

    def make(h: int, length: int, size: int) -> torch.Tensor:
        shape = (h, length, size) if dims == 3 else (batch, h, length, size)
        return torch.randn(shape, dtype=dtype).requires_grad_()

    q, k, v = (
        make(heads[0], lengths[0], 8), make(heads[1], lengths[1], 8),
        make(heads[1], lengths[1], width),
    )  # fmt: skip
    bias = torch.randn(bias_shape, dtype=dtype).requires_grad_() if bias_shape else None
    scale, causal = options.get("scale"), options.get("causal", False)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (q, k, v, bias)]
    expected = F.scaled_dot_product_attention(
        *wide[:3], attn_mask=wide[3], is_causal=causal, scale=scale, enable_gqa=heads[0] != heads[1]
    )
    grad = torch.randn(expected.shape).to(dtype)
    expected.backward(grad.double())
    actual, grads = _run(q, k, v, bias, grad, causal=causal, scale=scale)
    # The reference is float64: bfloat16 rounds the inputs' products, the probabilities and `out`.
    tolerance = {"rtol": 2e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(actual, expected.detach().to(dtype), **tolerance)
    for got, w in zip(grads, wide):
        if w is not None:
            torch.testing.assert_close(got, w.grad.to(dtype), **tolerance)


def test_fully_masked_row_is_zero_and_has_zero_gradient() -> None:
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    bias = torch.zeros(4, 4)
    bias[1] = -torch.inf
    actual, grads = _run(q, k, v, bias.requires_grad_(), torch.ones(1, 2, 4, 8))
    assert (actual[:, :, 1] == 0).all()
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :, 1] == 0).all()


def test_dropout_keeps_the_expected_share_and_backward_uses_the_same_mask() -> None:
    torch.manual_seed(0)
    length = 32
    q, k = torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)
    v = torch.eye(length).expand(2, 2, length, length).contiguous()  # makes the output P dropped
    out, grads = _run(q, k, v, None, torch.ones(2, 2, length, length), p=0.25)
    share = (out != 0).float().mean().item()
    assert abs(share - 0.75) < 0.05
    # dV = P_dropped^T @ 1: each row is a column sum of the forward's dropped probabilities.
    torch.testing.assert_close(grads[2][..., 0], out.sum(-2))


def test_no_double_precision_sneaks_in() -> None:
    q = jax.ShapeDtypeStruct((2, 3, 4, 8), np.float32)
    with jax.enable_x64(True):
        text = str(jax.make_jaxpr(lambda q: attention.attention(q, q, q, None, 0.0, True)[:2])(q))
    assert "f64" not in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_some_of_the_keys_follow_from_the_results_of_all(dtype: torch.dtype) -> None:
    q, k, v, grad = (torch.randn(2, 3, n, 4, dtype=dtype) for n in (5, 8, 8, 5))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves)
    out.backward(grad)
    scores = q @ k.transpose(-1, -2) / 2
    sums = torch.logsumexp(scores, -1).float()
    parts = []
    with jax.enable_x64(True):
        for rows in (slice(0, 3), slice(3, 8)):
            tensors = grad, q, k[:, :, rows], v[:, :, rows]
            seed = jnp.zeros((), np.int64)
            expected = (*(_aval(t.shape, dtype) for t in tensors[1:]), None)
            args = (
                *(to_jax(t.contiguous()) for t in tensors), None, [True, True, True, False],
                to_jax(out.detach()), to_jax(sums), None, None, 5, 8, 0.0, False, seed, seed,
            )  # fmt: skip
            found = call_lowering(REGISTRY.get(BACKWARD), args, {}, expected)
            parts.append([to_torch(g) for g in found[:3]])
    of_query = parts[0][0] + parts[1][0]
    of_keys, of_values = (torch.cat([part[i] for part in parts], 2) for i in (1, 2))
    # The sums are float32, whatever the inputs are.
    for found, leaf in zip((of_query, of_keys, of_values), leaves, strict=True):
        torch.testing.assert_close(found, leaf.grad, rtol=1e-5, atol=1e-5)
