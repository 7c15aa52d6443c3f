"""The connectionist temporal classification loss, with its lengths as arrays.

ATen's ops take the lengths of the sequences as lists of integers, which would make a program of
each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpu_core import _C
from tpu_core.recorder.error_parity import Refused
from tpu_core.recorder.functional_variants import overload_name

Tensor = torch.Tensor

_library = torch.library.Library("tpu", "FRAGMENT")
_library.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor lengths, int blank) -> (Tensor, Tensor)"
)
_library.define(
    "ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, Tensor lengths, "
    "Tensor neg_log_likelihood, Tensor log_alpha, int blank, bool zero_infinity) -> Tensor"
)


def _meta(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    steps, batch, _classes = log_probs.shape
    places = 2 * targets.size(1) + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, places)


_library.impl("ctc_loss", _meta, "Meta")
_library.impl("ctc_loss_backward", lambda _, x, *rest: torch.empty_like(x), "Meta")


def _arrays(
    targets: Tensor, input_lengths: Sequence[int], target_lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Labels (N, S), and the lengths of inputs and targets (2, N), on the device."""
    device = targets.device
    lengths = torch.tensor([input_lengths, target_lengths], dtype=torch.int32, device="cpu").to(
        device
    )
    count = max(target_lengths, default=0)
    if targets.dim() != 1:
        return targets[:, :count], lengths
    if not targets.numel():
        return targets.new_zeros(len(target_lengths), count), lengths
    from tpu_core.lowering.ctc import label_places  # JAX, which an import of this package is not

    places = torch.from_numpy(label_places(target_lengths, targets.numel())).flatten().to(device)
    return targets.index_select(0, places).unflatten(0, (-1, count)), lengths


def loss(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> Any:
    """Handler of ``aten::_ctc_loss``."""
    log_probs, targets, input_lengths, target_lengths, blank, _ = args
    try:
        op(log_probs.to("meta"), targets.to("meta"), *args[2:])
    except RuntimeError:  # the CPU's op says why, with the real values
        return Refused(op).run(op, args)
    labels, lengths = _arrays(targets, input_lengths, target_lengths)
    return torch.ops.tpu.ctc_loss(log_probs, labels, lengths, blank)


def loss_backward(_: torch._ops.OpOverload, args: tuple[Any, ...]) -> Tensor:
    """Handler of ``aten::_ctc_loss_backward``."""
    grad, log_probs, targets, input_lengths, target_lengths, *rest = args
    labels, lengths = _arrays(targets, input_lengths, target_lengths)
    return torch.ops.tpu.ctc_loss_backward(grad, log_probs, labels, lengths, *rest)


def of_tensors(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> Any:
    """Handler of the overloads that take the lengths as tensors, which the host reads."""
    first = 2 if op is torch.ops.aten._ctc_loss.Tensor else 3
    lengths = [_C.read_tensor(t, "ctc_loss").tolist() for t in args[first : first + 2]]
    packet = op.overloadpacket
    return packet.default(*args[:first], *lengths, *args[first + 2 :])


_HANDLERS = {
    "aten._ctc_loss.default": loss,
    "aten._ctc_loss_backward.default": loss_backward,
    "aten._ctc_loss.Tensor": of_tensors,
    "aten._ctc_loss_backward.Tensor": of_tensors,
}


def handler_of(op: torch._ops.OpOverload) -> Any:
    """The handler of an overload of the loss, or None."""
    return _HANDLERS.get(overload_name(op))
