"""The loss of a language model without its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from tpu_core.array_types import Float, Integer
from tpu_core.extend import BodyChecks
from tpu_kernels.decorator import jax_op
from tpu_kernels.ops.cross_entropy import reference

_forward = jax_op("tpu_kernels::linear_cross_entropy", reference.forward, differentiable=False)
_backward = jax_op(
    "tpu_kernels::linear_cross_entropy_backward", reference.backward, differentiable=False
)


def _labels(
    hidden: jax.Array, weight: jax.Array, target: jax.Array, *_: Any, **__: Any
) -> tuple[jax.Array, int]:
    return target, weight.shape[0]


def _labels_of_batches(
    hidden: jax.Array, weight: jax.Array, target: jax.Array, *rest: Any, **_: Any
) -> tuple[jax.Array, int]:
    """As `_labels`, where `torch.func.vmap` gives a dimension to some of the operands."""
    *_others, dims, _size = rest
    return target, weight.shape[1 if dims[1] == 0 else 0]


def _no_class(value: int) -> Exception:
    return IndexError(f"Target {value} is out of bounds.")


BodyChecks.declare_range("tpu_kernels.linear_cross_entropy.default", _labels, _no_class)
BodyChecks.declare_range(
    "tpu_kernels.linear_cross_entropy_vmap.default", _labels_of_batches, _no_class
)


@register_flop_formula(torch.ops.tpu_kernels.linear_cross_entropy)
def _forward_flops(hidden: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """Of a model's products: logits, and the hidden states' gradient where it is wanted."""
    wanted = bool(rest[-1])
    return 2 * (1 + wanted) * hidden[0] * hidden[1] * int(weight[0])


@register_flop_formula(torch.ops.tpu_kernels.linear_cross_entropy_backward)
def _backward_flops(grad: Any, logsumexp: Any, hidden: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Of a model's products: the weights' gradient, without the logits that it needs again."""
    return 2 * hidden[0] * hidden[1] * int(weight[0])


def linear_cross_entropy(
    hidden: Float[torch.Tensor, "*batch features"],
    weight: Float[torch.Tensor, "vocabulary features"],
    target: Integer[torch.Tensor, "*batch"],
    bias: Float[torch.Tensor, " vocabulary"] | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    chunk: int | None = None,
    plain: bool = False,
) -> Float[torch.Tensor, "*batch"] | Float[torch.Tensor, ""]:
    """``F.cross_entropy(F.linear(hidden, weight, bias), target)`` without building the logits.

    The vocabulary is gone through in chunks, forward and backward, so that memory grows with
    ``tokens * chunk`` and not with ``tokens * vocabulary``. Sums are in float32, or in float64.

    Args:
        hidden: ``(..., features)``.
        weight: ``(vocabulary, features)``.
        target: ``(...)``, integers below the vocabulary, or ``ignore_index``.
        bias: ``(vocabulary,)`` or None.
        ignore_index: Targets that count for nothing.
        reduction: ``"mean"`` (over the targets that count), ``"sum"`` or ``"none"``.
        label_smoothing: As of `torch.nn.functional.cross_entropy`.
        softcap: Logits are ``softcap * tanh(logits / softcap)`` unless it is 0.
        chunk: Columns of logits at a time; left to the implementation unless given.
        plain: Build the logits, as PyTorch does; also what is done with tensors on other devices.

    Returns:
        A number, or losses of the shape of ``target`` for ``"none"``, in the dtype of ``hidden``.
        A second derivative builds the logits.

    Raises:
        ValueError: An argument has a wrong shape or value.

    Example:
        >>> loss = tpu_kernels.linear_cross_entropy(model.trunk(ids), model.head.weight, labels)
    """
    _check(hidden, weight, target, bias, reduction)
    if plain or hidden.device.type != "tpu":
        logits = F.linear(hidden, weight, bias)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(
            logits.flatten(0, -2),
            target.flatten(),
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        ).reshape(target.shape if reduction == "none" else ())
    return wide_linear_cross_entropy(
        hidden,
        weight,
        target,
        bias,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        chunk=chunk or 0,
    ).to(hidden.dtype)


def wide_linear_cross_entropy(
    hidden: Float[torch.Tensor, "*batch features"],
    weight: Float[torch.Tensor, "vocabulary features"],
    target: Integer[torch.Tensor, "*batch"],
    bias: Float[torch.Tensor, " vocabulary"] | None,
    *,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float = 0.0,
    chunk: int = 0,
) -> Float[torch.Tensor, "*batch"] | Float[torch.Tensor, ""]:
    """`linear_cross_entropy` in float32, or in float64, on device ``tpu``; arguments unchecked."""
    if torch.is_autocast_enabled("tpu") and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype("tpu")
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    # As wide as they come: a label that is no class shall not become one.
    target = target.to(torch.int64)
    counts = target != ignore_index
    needed = torch.is_grad_enabled() and hidden.requires_grad
    losses, _, _ = _Losses.apply(
        hidden.reshape(-1, hidden.size(-1)),
        weight,
        torch.where(counts, target, 0).reshape(-1),
        bias,
        float(label_smoothing),
        float(softcap),
        chunk,
        needed,
    )
    losses = torch.where(counts, losses.reshape(target.shape), 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counts.sum()


class _Losses(torch.autograd.Function):
    """Losses and sums of rows, with the gradients by hidden states in hand."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        hidden: Float[torch.Tensor, "tokens features"],
        weight: Float[torch.Tensor, "vocabulary features"],
        target: Integer[torch.Tensor, " tokens"],
        bias: Float[torch.Tensor, " vocabulary"] | None,
        smoothing: float,
        softcap: float,
        chunk: int,
        slopes: bool,
    ) -> Any:
        return _forward(hidden, weight, target, bias, smoothing, softcap, chunk, slopes)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        hidden, weight, target, bias, smoothing, softcap, chunk, _ = inputs
        _, logsumexp, slopes = output
        ctx.mark_non_differentiable(logsumexp, slopes)
        ctx.save_for_backward(hidden, weight, target, bias, logsumexp, slopes)
        ctx.options = smoothing, softcap, chunk

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        hidden, weight, target, bias, logsumexp, slopes = ctx.saved_tensors
        wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[1] or ctx.needs_input_grad[3]
        given = (grad, hidden, weight, bias, target, logsumexp, slopes)
        of_hidden, of_weight, of_bias = _Gradients.apply(*given, *ctx.options, *wanted)
        return of_hidden, of_weight, None, of_bias, *(None,) * 4


class _Gradients(torch.autograd.Function):
    """The gradients of `_Losses`; theirs are those of the formula, with the logits in hand."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Float[torch.Tensor, " tokens"],
        hidden: Float[torch.Tensor, "tokens features"],
        weight: Float[torch.Tensor, "vocabulary features"],
        bias: Float[torch.Tensor, " vocabulary"] | None,
        target: Integer[torch.Tensor, " tokens"],
        logsumexp: Float[torch.Tensor, " tokens"],
        slopes: Float[torch.Tensor, "tokens features"],
        smoothing: float,
        softcap: float,
        chunk: int,
        wants_hidden: bool,
        wants_layer: bool,
    ) -> Any:
        of_hidden = of_weight = of_bias = None
        if wants_hidden:
            of_hidden = (grad[:, None] * slopes).to(hidden.dtype)
        if wants_layer:
            given = (grad, logsumexp, hidden, weight, target, bias)
            of_weight, of_bias = _backward(*given, smoothing, softcap, chunk)
        return of_hidden, of_weight, of_bias if bias is not None else None

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.options = inputs[7:9]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        grad, hidden, weight, bias, target = ctx.saved_tensors
        places = [i for i, g in enumerate(grads) if g is not None]
        if not places:
            return (None,) * 12
        leaves = (grad, hidden, weight) if bias is None else (grad, hidden, weight, bias)

        def chosen(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found = _gradients(leaves, target, *ctx.options)
            return tuple(found[i] for i in places)

        pull = torch.func.vjp(chosen, *leaves)[1]
        made = pull(tuple(grads[i] for i in places))
        return *made, *(None,) * (12 - len(made))


def _gradients(
    leaves: Sequence[torch.Tensor], target: torch.Tensor, smoothing: float, softcap: float
) -> tuple[torch.Tensor, ...]:
    """Of hidden states, weight and bias, in ops that have gradients.

    Args:
        leaves: Gradient of the losses, hidden states, weight, and bias if there is one.
        target, smoothing, softcap: As of `_Losses`.
    """
    grad, hidden, weight, *bias = leaves
    wide = grad.dtype
    logits = F.linear(hidden.to(wide), weight.to(wide), *(b.to(wide) for b in bias))
    bounded = torch.tanh(logits / softcap) if softcap else None
    shares = (logits if bounded is None else softcap * bounded).softmax(1)
    is_target = F.one_hot(target.long(), weight.size(0)).to(wide)
    slopes = shares - (1 - smoothing) * is_target - smoothing / weight.size(0)
    slopes = slopes * grad[:, None]
    if bounded is not None:
        slopes = slopes * (1 - bounded.square())
    made = slopes @ weight.to(wide), slopes.T @ hidden.to(wide), slopes.sum(0)
    return tuple(x.to(like.dtype) for x, like in zip(made, (hidden, weight, *bias)))


def _check(hidden: Any, weight: Any, target: Any, bias: Any, reduction: str) -> None:
    if hidden.dim() < 1 or weight.dim() != 2 or weight.size(1) != hidden.size(-1):
        raise ValueError(
            "linear_cross_entropy takes hidden (..., features) and weight (vocabulary, features), "
            f"not {tuple(hidden.shape)} and {tuple(weight.shape)}."
        )
    if hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"linear_cross_entropy: target has the shape {tuple(target.shape)}, and hidden without "
            f"its features {tuple(hidden.shape[:-1])}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy: bias has the shape {tuple(bias.shape)}, not "
            f"{tuple(weight.shape[:1])}."
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"linear_cross_entropy: reduction={reduction!r}: mean, sum or none.")
