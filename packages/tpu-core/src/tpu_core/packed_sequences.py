"""Packed sequences as padded ones, for recurrent layers: one loop whatever the lengths are.

`torch.nn.utils.rnn.PackedSequence` has the rows of a time step one after the other, as many as
there are sequences of that length, the longest first. ATen runs a step by itself, on as many rows
as it has, so that each set of lengths would be a program of its own.
"""

from __future__ import annotations

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
        step = torch.arange(self.steps).unsqueeze(1)
        sequence = torch.arange(self.batch)
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
