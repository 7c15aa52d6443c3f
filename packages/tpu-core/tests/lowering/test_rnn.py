"""Fused recurrent cells against ATen's composite cells and their autograd."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch

from tpu_core.dtypes import to_numpy_dtype
from tpu_core.lowering import rnn  # noqa: F401
from tpu_core.lowering.evaluate import call_lowering, to_jax, to_torch
from tpu_core.lowering.registry import REGISTRY

BATCH, HIDDEN = 3, 5


def _call(op: str, args: tuple[Any, ...], shapes: list[Any], dtype: torch.dtype) -> list[Any]:
    kind = to_numpy_dtype(dtype)
    out = tuple(None if s is None else jax.ShapeDtypeStruct(s, kind) for s in shapes)
    with jax.enable_x64(True):
        args = tuple(to_jax(a) if isinstance(a, torch.Tensor) else a for a in args)
        results = call_lowering(REGISTRY.get(op), args, {}, out)
    return [None if r is None else to_torch(r) for r in results]


def _operands(gates: int, bias: bool, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    shapes = [(BATCH, gates * HIDDEN)] * 2 + [(BATCH, HIDDEN)] + [(gates * HIDDEN,)] * 2
    return [
        torch.randn(s).to(dtype).requires_grad_() if i < 3 or bias else None
        for i, s in enumerate(shapes)
    ]


def _double(operands: list[Any]) -> list[Any]:
    return [None if t is None else t.detach().double().requires_grad_() for t in operands]


def _close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    # The reference is float64; a bfloat16 gradient comes from a workspace rounded to bfloat16.
    loose = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(actual, expected.detach().to(dtype), **loose)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("seeds", ["both", "hy", "cy"])
def test_lstm_cell(dtype: torch.dtype, bias: bool, seeds: str) -> None:
    operands = _operands(4, bias, dtype)
    x, h, cx, b1, b2 = wide = _double(operands)
    gates = x + h + (b1 + b2 if bias else 0)
    i, f, g, o = gates.chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    hy = o.sigmoid() * cy.tanh()
    state = (BATCH, HIDDEN)
    got = _call(
        "aten._thnn_fused_lstm_cell.default", tuple(operands), [state, state, tuple(x.shape)], dtype
    )
    _close(got[0], hy, dtype)
    _close(got[1], cy, dtype)
    ghy = torch.randn(state).to(dtype) if seeds != "cy" else None
    gcy = torch.randn(state).to(dtype) if seeds != "hy" else None
    torch.autograd.backward(
        [t for t, g in ((hy, ghy), (cy, gcy)) if g is not None],
        [g.double() for g in (ghy, gcy) if g is not None],
    )
    grads = _call(
        "aten._thnn_fused_lstm_cell_backward_impl.default",
        (ghy, gcy, operands[2], got[1], got[2], bias),
        [tuple(x.shape), state, (4 * HIDDEN,) if bias else None],
        dtype,
    )
    _close(grads[0], wide[0].grad, dtype)
    _close(grads[1], wide[2].grad, dtype)
    if bias:
        _close(grads[2], wide[3].grad, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_gru_cell(dtype: torch.dtype, bias: bool) -> None:
    operands = _operands(3, bias, dtype)
    wide = _double(operands)
    # The definition in torch.nn.GRUCell's documentation.
    xr, xz, xn = (wide[0] + (wide[3] if bias else 0)).chunk(3, 1)
    hr, hz, hn = (wide[1] + (wide[4] if bias else 0)).chunk(3, 1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    n = (xn + r * hn).tanh()
    hy = (1 - z) * n + z * wide[2]
    state = (BATCH, HIDDEN)
    got = _call(
        "aten._thnn_fused_gru_cell.default", tuple(operands), [state, (BATCH, 5 * HIDDEN)], dtype
    )
    _close(got[0], hy, dtype)
    grad = torch.randn(state).to(dtype)
    hy.backward(grad.double())
    gates, vector = (BATCH, 3 * HIDDEN), (3 * HIDDEN,) if bias else None
    grads = _call(
        "aten._thnn_fused_gru_cell_backward.default",
        (grad, got[1], bias),
        [gates, gates, state, vector, vector],
        dtype,
    )
    for actual, leaf in zip(grads, wide):
        if leaf is not None:
            _close(actual, leaf.grad, dtype)


def test_no_gradient_at_all() -> None:
    cx = torch.zeros(BATCH, HIDDEN)
    args = (None, None, cx, cx, torch.zeros(BATCH, 4 * HIDDEN), True)
    op = "aten._thnn_fused_lstm_cell_backward_impl.default"
    assert _call(op, args, [None, None, None], torch.float32) == [None, None, None]
