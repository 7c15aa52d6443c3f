"""Packed sequences by one gather and one scatter, and as padded ones for recurrent layers.

`torch.nn.utils.rnn.PackedSequence` has the rows of a time step one after the other, as many as
there are sequences of that length, the longest first. ATen copies and runs a step by itself, on as
many rows as it has, so that each set of lengths would be a program of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensor = torch.Tensor

MOST_PADDING = 4
"""Rows of the padded sequences for a row of data.

An LSTM of 256 features on 32 sequences, one of 100 steps and 31 of 24 (3.8 rows for one), takes 126
ms by CPU kernels; steps on the rows alone take 104, and PyTorch 132.
"""


def is_packed(x: Tensor, batch_sizes: Tensor) -> bool:
    """Return whether ``batch_sizes`` are those of ``x``, and padding them is worth it."""
    if type(batch_sizes) is not Tensor or not batch_sizes.is_cpu:
        return False
    if batch_sizes.dim() != 1 or batch_sizes.dtype != torch.int64:
        return False
    sizes = batch_sizes.tolist()
    falls = all(a >= b > 0 for a, b in zip(sizes, [*sizes[1:], 1]))
    rows = sum(sizes)
    return falls and rows == x.size(0) and sizes[0] * len(sizes) <= MOST_PADDING * rows


class PackedSteps:
    """Rows of packed sequences and where they are in padded ones, (T, N, features).

    In the direction from end to start each sequence begins with its own last step: it runs from
    step 0 on as well. A sequence that has ended repeats its last step.

    Args:
        batch_sizes: Sequences of at least that many steps, (T,), falling; on the CPU.
        device: Of the rows.
    """

    def __init__(self, batch_sizes: Tensor, device: torch.device) -> None:
        self.steps, self.batch = len(batch_sizes), int(batch_sizes[0])
        step = torch.arange(self.steps, device="cpu").unsqueeze(1)
        sequence = torch.arange(self.batch, device="cpu")
        is_there = batch_sizes.unsqueeze(1) > sequence
        end = is_there.sum(0) - 1
        first_row = batch_sizes.cumsum(0) - batch_sizes
        to_rows, to_places = [], []
        for of_step in (step.minimum(end), (end - step).clamp(min=0)):
            to_rows.append((first_row[of_step] + sequence).flatten().to(device))
            to_places.append((of_step * self.batch + sequence)[is_there].to(device))
        self._to_rows, self._to_places = to_rows, to_places
        self._to_last = (end * self.batch + sequence).to(device)

    def padded(self, gates: Tensor, reverse: bool) -> Tensor:
        """Gates of each time step, (T, N, gates), from those of the rows."""
        rows = gates.index_select(0, self._to_rows[reverse])
        return rows.unflatten(0, (self.steps, self.batch))

    def flat(self, ys: Tensor, reverse: bool) -> Tensor:
        """Results of the rows."""
        return ys.flatten(0, 1).index_select(0, self._to_places[reverse])

    def last(self, ys: Tensor, reverse: bool) -> Tensor:
        """Results of the step that each sequence ends with, (N, H)."""
        return ys.flatten(0, 1).index_select(0, self._to_last)

    def runs_reversed(self, reverse: bool) -> bool:
        return False


def _is_host_tensor(sizes: Any) -> bool:
    """Return whether sizes are where ATen wants them: it complains of others."""
    return type(sizes) is Tensor and sizes.device.type == "cpu"


def _rows(batch_sizes: Tensor, shape: Sequence[int], batch_first: bool) -> Tensor:
    """Rows of padded sequences, whose first two dims are one, that packed ones consist of."""
    batch = shape[0 if batch_first else 1]
    is_there = batch_sizes.unsqueeze(1) > torch.arange(batch, device="cpu")
    step, sequence = is_there.nonzero().unbind(1)
    return sequence * shape[1] + step if batch_first else step * batch + sequence


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._pack_padded_sequence.default
    if not _is_host_tensor(lengths) or x.dim() < 2 or not x.numel():
        return aten_composite(op, x, lengths, batch_first)
    # What ATen says of the lengths: on the CPU, without features.
    _, batch_sizes = op(torch.empty(x.shape[:2], device="cpu"), lengths, batch_first)
    if len(batch_sizes) > x.size(1 if batch_first else 0):  # ATen lets steps be missing
        return aten_composite(op, x, lengths, batch_first)
    row = _rows(batch_sizes, x.shape, batch_first)
    return x.flatten(0, 1).index_select(0, row.to(x.device)), batch_sizes


def _pack_backward(
    grad: Tensor, input_size: Sequence[int], batch_sizes: Tensor, batch_first: bool
) -> Tensor:
    if not _is_host_tensor(batch_sizes) or len(batch_sizes) > input_size[1 if batch_first else 0]:
        op = torch.ops.aten._pack_padded_sequence_backward.default
        return aten_composite(op, grad, input_size, batch_sizes, batch_first)
    row = _rows(batch_sizes, input_size, batch_first).to(grad.device)
    flat = grad.new_zeros((input_size[0] * input_size[1], *input_size[2:]))
    return flat.index_copy(0, row, grad).unflatten(0, input_size[:2])


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: Any, total_length: int
) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._pad_packed_sequence.default
    # Where data lacks rows ATen fails, or leaves some out.
    if not _is_host_tensor(batch_sizes) or not data.numel() or batch_sizes.sum() != len(data):
        return aten_composite(op, data, batch_sizes, batch_first, padding_value, total_length)
    padded, lengths = op(
        torch.empty(len(data), device="cpu"), batch_sizes, False, 0.0, total_length
    )
    steps, batch = padded.shape
    row = _rows(batch_sizes, padded.shape, False).to(data.device)
    result = data.new_full((steps * batch, *data.shape[1:]), padding_value)
    result = result.index_copy(0, row, data).unflatten(0, (steps, batch))
    return result.transpose(0, 1) if batch_first else result, lengths


def aten_composite(op: torch._ops.OpOverload, *arguments: Any) -> Any:
    """Call ATen's own kernel of an op that the device has another one of, in ops of ATen's.

    Args:
        op: The overload; ATen has a composite kernel of it.
        arguments: Its arguments.

    Example:
        >>> aten_composite(torch.ops.aten._pad_packed_sequence.default, x, sizes, True, 0.0, 9)
    """
    explicit = torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), "CompositeExplicitAutograd"
    )
    keys = torch._C.DispatchKey
    key = keys.CompositeExplicitAutograd if explicit else keys.CompositeImplicitAutograd
    # No public call picks a kernel of an overload by its key, and the stubs know only those.
    return op._op_dk(key, *arguments)  # type: ignore[attr-defined]


# With autograd's key where ATen's kernel is a composite, whose ops have the gradients.
_OVERRIDES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "_pack_padded_sequence": (_pack, ("PrivateUse1",)),
    "_pack_padded_sequence_backward": (_pack_backward, ("AutogradPrivateUse1", "PrivateUse1")),
    "_pad_packed_sequence": (_pad, ("AutogradPrivateUse1", "PrivateUse1")),
}


def register(library: torch.library.Library) -> None:
    """Put these in the place of ATen's composites."""
    for name, (kernel, keys) in _OVERRIDES.items():
        for key in keys:
            library.impl(name, kernel, key)
