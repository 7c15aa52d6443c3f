"""Fused LSTM and GRU cells, recurrent layers, and their gradients.

ATen's RNN.cpp takes the cells on an accelerator: one op a time step for all that follows the two
matrix products. Gate order, formulas and what the workspace holds are those of
aten/src/ATen/native/cuda/RNN.cu; everything is computed in the accumulating dtype. A layer, which
`tpu_core.recurrent` calls, is a loop of such cells over the time steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpu_core.array_types import Float
from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.matmul import contract
from tpu_core.lowering.registry import lowering


def _wide(*operands: Any) -> list[Any]:
    return [None if x is None else cast(x, op_math(x.dtype)) for x in operands]


def _split(gates: Array, count: int) -> list[Array]:
    size, last = gates.shape[-1] // count, gates.ndim - 1
    return [lax.slice_in_dim(gates, i * size, (i + 1) * size, axis=last) for i in range(count)]


def _sigmoid_slope(y: Array) -> Array:
    return y * (1 - y)


@lowering("aten._thnn_fused_lstm_cell.default")
def lstm_cell(
    input_gates: Float[Array, "batch gates"],
    hidden_gates: Float[Array, "batch gates"],
    cx: Float[Array, "batch hidden"],
    input_bias: Float[Array, " gates"] | None = None,
    hidden_bias: Float[Array, " gates"] | None = None,
) -> tuple[Float[Array, "batch hidden"], Float[Array, "batch hidden"], Float[Array, "batch gates"]]:
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
    grad_hy: Float[Array, "batch hidden"] | None,
    grad_cy: Float[Array, "batch hidden"] | None,
    cx: Float[Array, "batch hidden"],
    cy: Float[Array, "batch hidden"],
    workspace: Float[Array, "batch 4*hidden"],
    has_bias: bool,
) -> tuple[
    Float[Array, "batch 4*hidden"] | None,
    Float[Array, "batch hidden"] | None,
    Float[Array, " 4*hidden"] | None,
]:
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
    input_gates: Float[Array, "batch gates"],
    hidden_gates: Float[Array, "batch gates"],
    hx: Float[Array, "batch hidden"],
    input_bias: Float[Array, " gates"] | None = None,
    hidden_bias: Float[Array, " gates"] | None = None,
) -> tuple[Float[Array, "batch hidden"], Float[Array, "batch 5*hidden"]]:
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
    grad_hy: Float[Array, "batch hidden"], workspace: Float[Array, "batch 5*hidden"], has_bias: bool
) -> tuple[
    Float[Array, "batch 3*hidden"],
    Float[Array, "batch 3*hidden"],
    Float[Array, "batch hidden"],
    Float[Array, " 3*hidden"] | None,
    Float[Array, " 3*hidden"] | None,
]:
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


def _times(
    x: Float[Array, "batch hidden"], weight: Float[Array, "gates hidden"]
) -> Float[Array, "batch gates"]:
    """``x @ weight.T``, in the accumulating dtype."""
    return contract(x, weight, (((1,), (1,)), ((), ())))


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "relu": lambda x: jnp.maximum(x, jnp.zeros((), x.dtype)),
}
# Gradients of the operand, from those of the result and the result.
_GRADIENTS: dict[str, Callable[[Array, Array], Array]] = {
    "tanh": lambda grad, y: grad * (1 - y * y),
    "relu": lambda grad, y: jnp.where(y <= 0, jnp.zeros((), grad.dtype), grad),
}


@lowering("tpu.rnn_layer.default")
def rnn_layer(
    gates: Float[Array, "steps batch gates"],
    hx: Float[Array, "batch hidden"],
    cx: Float[Array, "batch hidden"] | None,
    weight: Float[Array, "gates hidden"],
    bias: Float[Array, " gates"] | None,
    kind: str,
    reverse: bool,
) -> tuple[Float[Array, "steps batch hidden"], Float[Array, " ..."], Float[Array, " ..."]]:
    """One direction of a layer.

    Args:
        gates: Addends of the gates at each time step, from the input.
        hx, cx: Hidden state, and for ``kind="lstm"`` cell state.
        weight, bias: Factor of the hidden state, and addend of the product.
        kind: ``"lstm"``, ``"gru"``, ``"tanh"`` or ``"relu"``.
        reverse: Go from the last time step to the first.

    Returns:
        The hidden and the cell state after each time step, and the cells' workspaces. What a kind
        does not have is empty.
    """
    none = jnp.zeros((0,), hx.dtype)

    def cell(state: list[Array], x: Array) -> tuple[Array, ...]:
        hidden = _times(state[0], weight)
        wide_x = cast(x, hidden.dtype)
        if kind == "gru":
            zero = None if bias is None else jnp.zeros_like(bias)
            return gru_cell(wide_x, hidden, state[0], zero, bias)
        if bias is not None:
            hidden = hidden + cast(bias, hidden.dtype)
        if kind == "lstm":
            return lstm_cell(wide_x, hidden, state[1])
        return (_ACTIVATIONS[kind](wide_x + hidden),)

    def step(state: list[Array], x: Array) -> tuple[list[Array], list[Array]]:
        results = [cast(r, hx.dtype) for r in cell(state, x)]
        return results[: len(state)], results

    start = [hx] if cx is None else [hx, cx]
    ys, *rest = lax.scan(step, start, gates, reverse=reverse)[1]
    cells = rest.pop(0) if kind == "lstm" else none
    return ys, cells, rest[0] if rest else none


@lowering("tpu.rnn_layer_backward.default")
def rnn_layer_backward(
    grad_ys: Float[Array, "steps batch hidden"] | None,
    grad_cells: Float[Array, "steps batch hidden"] | None,
    hx: Float[Array, "batch hidden"],
    cx: Float[Array, "batch hidden"] | None,
    weight: Float[Array, "gates hidden"],
    ys: Float[Array, "steps batch hidden"],
    cells: Float[Array, " ..."],
    workspace: Float[Array, " ..."],
    kind: str,
    reverse: bool,
) -> tuple[
    Float[Array, "steps batch gates"],
    Float[Array, "batch hidden"],
    Float[Array, " ..."],
    Float[Array, "gates hidden"],
    Float[Array, " gates"],
]:
    """Gradients of ``gates``, ``hx``, ``cx`` (empty without one), ``weight`` and ``bias``."""
    grads = jnp.zeros_like(ys) if grad_ys is None else grad_ys
    wide = op_math(hx.dtype)

    def step(state: list[Array], x: list[Array | None]) -> tuple[list[Array], list[Array]]:
        grad, grad_c, y, cy, before, saved = x
        grad = cast(grad, wide) + state[0]
        if kind == "lstm":
            grad_c = state[1] if grad_c is None else cast(grad_c, wide) + state[1]
            pre, grad_c, _ = lstm_cell_backward(grad, grad_c, before, cy, saved, False)
            return [_back(pre, weight), grad_c], [pre]
        if kind == "gru":
            pre, hidden, rest, *_ = gru_cell_backward(grad, saved, False)
            return [_back(hidden, weight) + rest], [pre, hidden]
        pre = _GRADIENTS[kind](grad, cast(y, wide))
        return [_back(pre, weight)], [pre]

    start = [jnp.zeros(hx.shape, wide)] * (2 if kind == "lstm" else 1)
    xs = [
        grads,
        grad_cells,
        None if kind in ("lstm", "gru") else ys,
        cells if kind == "lstm" else None,
        _before(cells, cx, reverse) if cx is not None else None,
        workspace if kind in ("lstm", "gru") else None,
    ]
    (grad_hx, *grad_cx), made = lax.scan(step, start, xs, reverse=not reverse)
    # As ATen's cells round the gradient of the gates.
    made = [cast(x, hx.dtype) for x in made]
    grad_gates, grad_hidden = made[0], made[-1]
    grad_weight = contract(grad_hidden, _before(ys, hx, reverse), (((0, 1), (0, 1)), ((), ())))
    grad_bias = jnp.sum(cast(grad_hidden, wide), axis=(0, 1))
    none = jnp.zeros((0,), hx.dtype)
    return grad_gates, grad_hx, grad_cx[0] if grad_cx else none, grad_weight, grad_bias


def _back(
    grad: Float[Array, "batch gates"], weight: Float[Array, "gates hidden"]
) -> Float[Array, "batch hidden"]:
    return contract(cast(grad, weight.dtype), weight, (((1,), (0,)), ((), ())))


def _before(
    states: Float[Array, "steps batch hidden"], first: Float[Array, "batch hidden"], reverse: bool
) -> Float[Array, "steps batch hidden"]:
    """The state that each time step began with."""
    parts = [states[1:], first[None]] if reverse else [first[None], states[:-1]]
    return jnp.concatenate(parts)
