"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as one op a layer and direction.

ATen takes them apart into the ops of each time step. Here a layer is one op with a loop inside, so
that a program is as small for a thousand steps as for one, and one program serves sequences of many
lengths (`tpu_core.padding`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from tpu_core import packed_sequences

Tensor = torch.Tensor

_library = torch.library.Library("tpu", "FRAGMENT")
_library.define(
    "rnn_layer(Tensor gates, Tensor hx, Tensor? cx, Tensor weight, Tensor? bias, str kind, "
    "bool reverse) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "rnn_layer_backward(Tensor? grad_ys, Tensor? grad_cells, Tensor hx, Tensor? cx, "
    "Tensor weight, Tensor ys, Tensor cells, Tensor workspace, str kind, bool reverse) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_WORKSPACE = {"lstm": 4, "gru": 5}  # states' worth of what a cell keeps for its gradient


def _layer_meta(
    gates: Tensor, hx: Tensor, cx: Tensor | None, weight: Tensor, bias: Any, kind: str, _: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = gates.size(0), *hx.shape
    kept = (*shape[:2], shape[2] * _WORKSPACE[kind]) if kind in _WORKSPACE else (0,)
    return (
        hx.new_empty(shape),
        hx.new_empty(shape if kind == "lstm" else 0),
        hx.new_empty(kept),
    )


def _layer_backward_meta(
    _ys: Any, _cells: Any, hx: Tensor, cx: Tensor | None, weight: Tensor, ys: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    gates = hx.new_empty(*ys.shape[:2], weight.size(0))
    grad_cx = hx.new_empty(0 if cx is None else cx.shape)
    return gates, hx.new_empty(hx.shape), grad_cx, weight.new_empty(weight.shape), gates[0, 0]


_library.impl("rnn_layer", _layer_meta, "Meta")
_library.impl("rnn_layer_backward", _layer_backward_meta, "Meta")


class _Layer(torch.autograd.Function):
    """``tpu::rnn_layer`` with its gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = torch.ops.tpu.rnn_layer(*inputs)
        *tensors, ctx.kind, ctx.reverse = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, grad_ys: Any, grad_cells: Any, _: Any) -> Any:
        gates, hx, cx, weight, bias, ys, cells, workspace = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient that is differentiated again
            inputs = [gates, hx, cx, weight, bias]
            grads = _gradients_by_steps(inputs, [grad_ys, grad_cells], ctx.kind, ctx.reverse)
            return *grads, None, None
        grads = torch.ops.tpu.rnn_layer_backward(
            grad_ys, grad_cells, hx, cx, weight, ys, cells, workspace, ctx.kind, ctx.reverse
        )
        grad_gates, grad_hx, grad_cx, grad_weight, grad_bias = grads
        return (
            grad_gates,
            grad_hx,
            None if cx is None else grad_cx,
            grad_weight,
            None if bias is None else grad_bias,
            None,
            None,
        )


def _by_steps(inputs: Sequence[Tensor | None], kind: str, reverse: bool) -> list[Tensor]:
    """Results of a layer, and the cells of an LSTM, from pointwise ops of each time step."""
    gates, h, c, weight, bias = inputs
    assert gates is not None and h is not None and weight is not None
    ys, cells = [], []
    steps = gates.unbind(0)
    for x in reversed(steps) if reverse else steps:
        hidden = F.linear(h, weight, bias)
        if kind == "lstm":
            assert c is not None
            i, f, g, o = (x + hidden).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            cells.append(c)
            h = o.sigmoid() * c.tanh()
        elif kind == "gru":
            (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), hidden.chunk(3, 1)
            n = (xn + (xr + hr).sigmoid() * hn).tanh()
            h = n + (xz + hz).sigmoid() * (h - n)
        else:
            h = (x + hidden).tanh() if kind == "tanh" else (x + hidden).relu()
        ys.append(h)
    return [torch.stack(s[::-1] if reverse else s) for s in (ys, cells) if s]


def _layer_by_steps(*inputs: Any) -> tuple[Tensor, Tensor, None]:
    """A layer whose forward derivative PyTorch knows; it has none of a fused cell's."""
    *tensors, kind, reverse = inputs
    results = _by_steps(tensors, kind, reverse)
    return results[0], results[-1], None


def _gradients_by_steps(
    inputs: list[Tensor | None], grads: list[Tensor | None], kind: str, reverse: bool
) -> list[Tensor | None]:
    """Gradients of a layer that can be differentiated, from ATen's ops of each time step."""
    results = _by_steps(inputs, kind, reverse)
    pairs = [(r, g) for r, g in zip(results, grads) if g is not None]
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(
        torch.autograd.grad([r for r, _ in pairs], wanted, [g for _, g in pairs], create_graph=True)
    )
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


_GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}


class _Steps:
    """Time steps of whole sequences, (T, N, features)."""

    def __init__(self, x: Tensor) -> None:
        self.batch = x.size(1)

    def padded(self, gates: Tensor, reverse: bool) -> Tensor:
        """Gates of each time step."""
        return gates

    def flat(self, ys: Tensor, reverse: bool) -> Tensor:
        """Results in the order of the input."""
        return ys

    def last(self, ys: Tensor, reverse: bool) -> Tensor:
        """Results of the step that ends the sequences."""
        return ys[0 if reverse else -1]

    def runs_reversed(self, reverse: bool) -> bool:
        return reverse


def _run(
    kind: str,
    op: torch._ops.OpOverload,
    x: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    arguments = (x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    if x.dim() != 3 or not x.numel():
        return packed_sequences.aten_composite(op, *arguments)
    x = x.transpose(0, 1) if batch_first else x
    results = _layers(kind, x, _Steps(x), hx, *arguments[2:-1])
    if results is None:
        return packed_sequences.aten_composite(op, *arguments)
    y, *last = results
    return y.transpose(0, 1) if batch_first else y, *last


def _run_packed(
    kind: str, op: torch._ops.OpOverload, x: Tensor, batch_sizes: Tensor, hx: Any, *rest: Any
) -> Any:
    if x.dim() == 2 and x.numel() and packed_sequences.is_packed(x, batch_sizes) and kind != "relu":
        # Beyond its end a sequence goes on with its last gates. What no result takes has gradients
        # of zero, if it is finite: a state of relu may grow beyond all numbers.
        results = _layers(kind, x, packed_sequences.PackedSteps(batch_sizes, x.device), hx, *rest)
        if results is not None:
            return tuple(results)
    return packed_sequences.aten_composite(op, x, batch_sizes, hx, *rest)


def _layers(
    kind: str,
    x: Tensor,
    steps: _Steps | packed_sequences.PackedSteps,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> list[Tensor] | None:
    """Outputs and last states of the layers; None where ATen's path is to be taken."""
    states = list(hx) if kind == "lstm" else [hx]
    directions = 2 if bidirectional else 1
    count = 4 if has_biases else 2
    transforms = torch._C._are_functorch_transforms_active()
    has_tangents = _has_tangents((x, *states, *params), transforms)
    usual = _usual(kind, x, steps.batch, states, params, num_layers, directions, count)
    if not usual or (transforms and not has_tangents):
        return None
    differentiates = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *states, *params))
    run_layer = _Layer.apply if differentiates else torch.ops.tpu.rnn_layer.default
    if has_tangents:
        run_layer = _layer_by_steps
    last: list[list[Tensor]] = [[] for _ in states]
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            i, reverse = layer * directions + direction, bool(direction)
            weight, hidden_weight, *biases = params[i * count : (i + 1) * count]
            gates = F.linear(x, weight, *biases[:1])
            # Autocast chose the dtype of the gates; the rest follows.
            h, *c = (_cast(s[i], gates.dtype) for s in states)
            ys, cells, _ = run_layer(
                steps.padded(gates, reverse),
                h,
                c[0] if c else None,
                _cast(hidden_weight, gates.dtype),
                _cast(biases[1], gates.dtype) if biases else None,
                kind,
                steps.runs_reversed(reverse),
            )
            outputs.append(steps.flat(ys, reverse))
            for kept, sequence in zip(last, (ys, cells)):
                kept.append(steps.last(sequence, reverse))
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            x = F.dropout(x, dropout, training=True)
    return [x, *(torch.stack(kept) for kept in last)]


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)


def _has_tangents(tensors: Sequence[Tensor], transforms: bool) -> bool:
    """Return whether a call has a forward-mode derivative, by dual numbers or by `torch.func`."""
    if transforms:
        functorch = torch._C._functorch
        stack = functorch.get_interpreter_stack() or ()
        return any(layer.key() == functorch.TransformType.Jvp for layer in stack)
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _usual(
    kind: str,
    x: Tensor,
    batch: int,
    states: list[Tensor],
    params: Sequence[Tensor],
    layers: int,
    directions: int,
    count: int,
) -> bool:
    """Return whether the layers are without projections, and what they get fits; else ATen says
    why.
    """
    if len(states) != (2 if kind == "lstm" else 1) or len(params) != layers * directions * count:
        return False
    device, dtype = x.device, params[0].dtype
    if any(t.device != device or t.dtype is not dtype for t in params):
        return False
    if any(t.device != device or t.dtype is not x.dtype for t in states):
        return False
    hidden, features = params[1].size(-1), x.size(-1)
    gates = _GATES[kind] * hidden
    for layer in range(layers):
        shapes = [(gates, features), (gates, hidden), (gates,), (gates,)][:count] * directions
        start = layer * len(shapes)
        if [p.shape for p in params[start : start + len(shapes)]] != shapes:
            return False
        features = directions * hidden
    state = layers * directions, batch, hidden
    return all(s.shape == state for s in states)


_OPS: dict[str, str] = {"lstm": "lstm", "gru": "gru", "tanh": "rnn_tanh", "relu": "rnn_relu"}
_overrides: list[torch.library.Library] = []


def register() -> None:
    """Put the layers in the place of ATen's composites; a second call does nothing."""
    if _overrides:
        return
    library = torch.library.Library("aten", "IMPL")
    _overrides.append(library)
    packed_sequences.register(library)
    for kind, name in _OPS.items():
        packet = getattr(torch.ops.aten, name)
        for overload, run in (("input", _run), ("data", _run_packed)):
            kernel: Callable[..., Any] = partial(run, kind, getattr(packet, overload))
            for key in ("AutogradPrivateUse1", "PrivateUse1"):  # with and without inference mode
                library.impl(f"{name}.{overload}", kernel, key)
