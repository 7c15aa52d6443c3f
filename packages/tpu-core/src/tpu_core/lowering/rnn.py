"""Fused LSTM and GRU cells and their gradients.

ATen's RNN.cpp takes these on an accelerator: one op a time step for all that follows the two matrix
products. Gate order, formulas and what the workspace holds are those of
aten/src/ATen/native/cuda/RNN.cu; everything is computed in the accumulating dtype.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tpu_core.lowering.dtypes import cast, op_math
from tpu_core.lowering.registry import lowering


def _wide(*operands: Any) -> list[Any]:
    return [None if x is None else cast(x, op_math(x.dtype)) for x in operands]


def _split(gates: jax.Array, count: int) -> list[jax.Array]:
    size = gates.shape[-1] // count
    return [gates[..., i * size : (i + 1) * size] for i in range(count)]


def _sigmoid_slope(y: jax.Array) -> jax.Array:
    return y * (1 - y)


@lowering("aten._thnn_fused_lstm_cell.default")
def lstm_cell(
    input_gates: jax.Array,
    hidden_gates: jax.Array,
    cx: jax.Array,
    input_bias: jax.Array | None = None,
    hidden_bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden state, cell state, and the activated gates (input, forget, cell, output)."""
    gates, hidden, cx, b1, b2 = _wide(input_gates, hidden_gates, cx, input_bias, hidden_bias)
    gates = gates + hidden
    if b1 is not None:
        gates = gates + (b1 + b2)
    i, f, c, o = _split(gates, 4)
    i, f, c, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(c), jax.nn.sigmoid(o)
    cy = f * cx + i * c
    return o * jnp.tanh(cy), cy, jnp.concatenate([i, f, c, o], axis=-1)


@lowering("aten._thnn_fused_lstm_cell_backward_impl.default")
def lstm_cell_backward(
    grad_hy: jax.Array | None,
    grad_cy: jax.Array | None,
    cx: jax.Array,
    cy: jax.Array,
    workspace: jax.Array,
    has_bias: bool,
) -> tuple[Any, Any, Any]:
    """Gradient of the summed gates (of either product), of ``cx`` and of either bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    grad_hy, grad_cy, cx, cy, gates = _wide(grad_hy, grad_cy, cx, cy, workspace)
    i, f, c, o = _split(gates, 4)
    zero = jnp.zeros((), cx.dtype)
    tanh_cy = jnp.tanh(cy)
    grad_o = zero if grad_hy is None else grad_hy * tanh_cy
    grad_c = zero if grad_hy is None else grad_hy * o * (1 - tanh_cy * tanh_cy)
    grad_c = grad_c if grad_cy is None else grad_c + grad_cy
    parts = [
        grad_c * c * _sigmoid_slope(i),
        grad_c * cx * _sigmoid_slope(f),
        grad_c * i * (1 - c * c),
        grad_o * _sigmoid_slope(o),
    ]
    grad_gates = jnp.concatenate(parts, axis=-1)
    # RNN.cu sums the gates after rounding them to the workspace's dtype.
    rounded = cast(cast(grad_gates, workspace.dtype), grad_gates.dtype)
    return grad_gates, grad_c * f, jnp.sum(rounded, axis=0) if has_bias else None


@lowering("aten._thnn_fused_gru_cell.default")
def gru_cell(
    input_gates: jax.Array,
    hidden_gates: jax.Array,
    hx: jax.Array,
    input_bias: jax.Array | None = None,
    hidden_bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Hidden state, and ``[reset, update, new, hx, hidden part of new]`` for the gradient."""
    gates, hidden, hx, b1, b2 = _wide(input_gates, hidden_gates, hx, input_bias, hidden_bias)
    if b1 is not None:
        gates, hidden = gates + b1, hidden + b2
    (r, z, n), (hr, hz, hn) = _split(gates, 3), _split(hidden, 3)
    r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
    n = jnp.tanh(n + r * hn)
    return n + z * (hx - n), jnp.concatenate([r, z, n, hx, hn], axis=-1)


@lowering("aten._thnn_fused_gru_cell_backward.default")
def gru_cell_backward(
    grad_hy: jax.Array, workspace: jax.Array, has_bias: bool
) -> tuple[Any, Any, Any, Any, Any]:
    """Gradients of both products, of ``hx`` and of both biases."""
    grad, saved = _wide(grad_hy, workspace)
    r, z, n, hx, hn = _split(saved, 5)
    grad_z = grad * (hx - n) * _sigmoid_slope(z)
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r = grad_n * hn * _sigmoid_slope(r)
    grad_input = jnp.concatenate([grad_r, grad_z, grad_n], axis=-1)
    grad_hidden = jnp.concatenate([grad_r, grad_z, grad_n * r], axis=-1)
    if not has_bias:
        return grad_input, grad_hidden, grad * z, None, None
    biases = [
        jnp.sum(cast(cast(g, workspace.dtype), g.dtype), axis=0) for g in (grad_input, grad_hidden)
    ]
    return grad_input, grad_hidden, grad * z, *biases
