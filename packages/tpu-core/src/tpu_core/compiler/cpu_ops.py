"""The CPU's op that computes what a functional overload does, for parts and verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tpu_core import _C
from tpu_core.recorder.functional_variants import overload_of

# Overloads of the device in place of which the CPU has another of the same arguments.
_TWINS = {
    "aten.convolution_overrideable.default": "aten.convolution.default",
    "aten.convolution_backward_overrideable.default": "aten.convolution_backward.default",
}
# Ops that PyTorch has no CPU kernel for and the host tier a function.
_HOST_FUNCTIONS = frozenset(
    """
    aten._fused_rms_norm_backward.default aten._thnn_fused_gru_cell.default
    aten._thnn_fused_gru_cell_backward.default aten._thnn_fused_lstm_cell.default
    aten._thnn_fused_lstm_cell_backward_impl.default tpu.rnn_layer.default
    tpu.rnn_layer_backward.default
    """.split()
)
_ATTENTION = frozenset(
    f"aten._scaled_dot_product_fused_attention_overrideable{suffix}.default"
    for suffix in ("", "_backward")
)


@dataclass(frozen=True, slots=True)
class CpuOp:
    """A function of CPU tensors, called with the arguments of an overload by their names.

    Attributes:
        call: The function.
        takes_dtype: Whether the overload has an argument ``dtype``.
    """

    call: Callable[..., Any]
    takes_dtype: bool = False


@cache
def cpu_op(name: str) -> CpuOp | None:
    """The CPU's op of a functional overload's name, or None.

    Example:
        >>> cpu_op("aten.sum.default").takes_dtype
        True
    """
    name = _TWINS.get(name, name)
    if name in _FUNCTIONS:
        return CpuOp(_FUNCTIONS[name])
    if name in _HOST_FUNCTIONS:
        return CpuOp(_host_function(overload_of(name)))
    if name in _ATTENTION:
        return CpuOp(_attention(overload_of(name)))
    if not name.startswith("aten.") or "overrideable" in name:
        return None
    op = overload_of(name)
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU"):
        return None
    return CpuOp(op, any(a.name == "dtype" for a in op._schema.arguments))


def _host_function(op: torch._ops.OpOverload) -> Callable[..., Any]:
    schema = op._schema

    def call(**given: Any) -> Any:
        arguments = (given.get(a.name, a.default_value) for a in schema.arguments)
        return _C.call_host_function(schema.name, tuple(arguments))

    return call


def _attention(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The CPU's kernel takes less than the lowering, and gives no gradient of a mask."""
    host = _host_function(op)

    def call(**given: Any) -> Any:
        query, key, value = (given[name] for name in ("query", "key", "value"))
        mask, wanted = given["attn_bias"], given.get("grad_input_mask", ())
        is_taken = (
            given["dropout_p"] == 0
            and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
            and query.size(-1) == value.size(-1)
            and all(t.numel() > 0 and t.stride(-1) == 1 for t in (query, key, value))
            and (mask is None or mask.dim() in (2, 4))
            and not any(wanted[3:])
        )
        # As an op of CPU kernels alone does for a dtype: `replay` has the lowering then, or leaves
        # the whole part to a program.
        if not is_taken:
            raise NotImplementedError("attention of a kind that the CPU has no kernel for")
        return host(**given)

    return call


def _batch_norm(*, running_mean: Any, running_var: Any, **given: Any) -> Any:
    """The functional overload takes no statistics that are not there."""
    if running_mean is None and running_var is None:
        return torch.ops.aten._native_batch_norm_legit.no_stats(**given)
    functional = torch.ops.aten._native_batch_norm_legit_functional.default
    return functional(running_mean=running_mean, running_var=running_var, **given)


def _arange(*, start: float, step: float, **given: torch.Tensor) -> torch.Tensor:
    """As its lowering computes it: in 64 bits, rounded once."""
    out = given["self"]
    dtype, kind = (torch.float64, float) if out.is_floating_point() else (torch.int64, int)
    index = torch.arange(out.numel(), dtype=dtype, device="cpu")
    return (kind(start) + index * kind(step)).to(out.dtype)


def _ctc_loss(*, lengths: torch.Tensor, **given: Any) -> Any:
    inputs, targets = lengths.tolist()
    loss, log_alpha = torch.ops.aten._ctc_loss.default(
        input_lengths=inputs, target_lengths=targets, zero_infinity=False, **given
    )
    # The kernel leaves memory beyond the lengths as it was.
    for alpha, steps, labels in zip(log_alpha, inputs, targets):
        alpha[steps:] = alpha[:, 2 * labels + 1 :] = float("-inf")
    return loss, log_alpha


def _ctc_loss_backward(*, lengths: torch.Tensor, **given: Any) -> torch.Tensor:
    inputs, targets = lengths.tolist()
    return torch.ops.aten._ctc_loss_backward.default(
        input_lengths=inputs, target_lengths=targets, **given
    )


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "tpu.arange.default": _arange,
    "tpu.ctc_loss.default": _ctc_loss,
    "tpu.ctc_loss_backward.default": _ctc_loss_backward,
}
