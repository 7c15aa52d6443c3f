"""Attention whose keys and values go round the processes: each has the part of one other at a time.

What a process computes of each part is merged by the logarithms of the sums of exponentials, as
flash attention merges blocks. No process ever has the keys and values of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Of `[batch, heads, sequence, features]`.
_SEQUENCE = 2
_FORWARD = torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default
_BACKWARD = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward.default


@dataclass(frozen=True)
class Step:
    """Computation with one part of the keys and values.

    Attributes:
        first: Its first row of queries.
        end: End of the columns of keys.
        is_causal: Whether a row sees the columns up to its own number alone.
    """

    first: int
    end: int
    is_causal: bool


def steps(
    rank: int, size: int, queries: int, keys: int, is_causal: bool, balanced: bool
) -> list[Step | None]:
    """Steps of the ring: a process computes with its own part, then that of the one before.

    Balanced, a part is a piece of the first half of the sequence and its mirror image in the
    second. Of another process's part all of one half is masked for each half of this one's, or
    nothing.

    Args:
        rank: Of the process.
        size: Number of processes.
        queries: Rows of each.
        keys: Columns of each.
        is_causal: Whether what comes later in the sequence is masked.
        balanced: Whether the sequence was divided so that all have as much to do.

    Returns:
        One for each part; None where all is masked.

    Raises:
        NotImplementedError: Causal, and there are more queries than keys, or fewer.

    Example:
        >>> steps(0, 2, 8, 8, is_causal=True, balanced=True)
        [Step(first=0, end=8, is_causal=True), Step(first=4, end=8, is_causal=False)]
    """
    if not is_causal:
        return [Step(0, keys, False)] * size
    if queries != keys:
        # Where a part begins in the mask would differ for rows and columns: no step is all or none.
        raise NotImplementedError(
            f"Attention in context_parallel with set_rotate_method('alltoall') and is_causal=True "
            f"takes as many keys as queries, not {keys} for {queries} in each process. Use "
            "set_rotate_method('allgather')."
        )
    found: list[Step | None] = [Step(0, keys, True)]
    for i in range(1, size):
        if i <= rank:  # the part of a process before this one
            found.append(Step(0, keys // 2 if balanced else keys, False))
        else:
            found.append(Step(queries // 2, keys, False) if balanced else None)
    return found


def forward(
    group: Any,
    plan: Sequence[Step | None],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The attention of a process's queries to the keys and values of all.

    Args:
        group: The processes.
        plan: Of this process, see `steps`.
        query: Its own part, ``[batch, heads, queries, features]``; so for ``key`` and ``value``.
        key: ``[batch, key heads, keys, features]``.
        value: As the keys.
        dropout: Probability.
        kwargs: ``scale``.

    Returns:
        Output; logsumexp; seed and offset of each step's dropout, ``[processes]``.
    """
    out = query.new_zeros((*query.shape[:3], value.shape[3]), dtype=_sums_dtype(query))
    logsumexp = query.new_full(query.shape[:3], -math.inf, dtype=torch.float32)
    seeds = torch.zeros(2, len(plan), dtype=torch.int64, device=query.device)
    ring = _Ring(group, [key, value])
    for i, step in enumerate(plan):
        key, value = ring.tensors
        if i + 1 < len(plan):
            ring.pass_on()
        if step is not None:
            part, sums, *_, seed, offset, _ = _FORWARD(
                _rows(query, step), _columns(key, step), _columns(value, step), None, dropout,
                step.is_causal, **kwargs,
            )  # fmt: skip
            _merge(out[:, :, step.first :], logsumexp[:, :, step.first :], part, sums)
            if dropout:
                seeds[0, i], seeds[1, i] = seed, offset
    return out.to(query.dtype), logsumexp, seeds[0], seeds[1]


def backward(
    group: Any,
    plan: Sequence[Step | None],
    inputs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    grad_out: torch.Tensor,
    wanted: Sequence[bool],
    sizes: Sequence[Any],
    dropout: float,
    **kwargs: Any,
) -> list[torch.Tensor]:
    """The gradients of `forward`; those of keys and values go round with what they are of.

    Args:
        group: As there.
        plan: As there.
        inputs: This process's query, key and value.
        results: Results of `forward`.
        grad_out: Gradient of the output.
        wanted: Whether the gradients of query, key and value are asked for.
        sizes: Variable lengths that the op takes.
        dropout: As there.
        kwargs: As there.

    Returns:
        Gradients of the inputs.
    """
    query, key, value = inputs
    out, logsumexp, seeds, offsets = results
    grad_query = torch.zeros_like(query, dtype=_sums_dtype(query))
    ring = _Ring(group, [key, value])
    grads = _Ring(group, [torch.zeros_like(t, dtype=_sums_dtype(t)) for t in (key, value)])
    for i, step in enumerate(plan):
        key, value = ring.tensors
        if i + 1 < len(plan):
            ring.pass_on()
        if step is not None:
            parts = _BACKWARD(
                *(_rows(grad_out, step), _rows(query, step)),
                *(_columns(key, step), _columns(value, step), None, [*wanted, False]),
                *(_rows(out, step), _rows(logsumexp, step), *sizes),
                *(dropout, step.is_causal, seeds[i], offsets[i]),
                **kwargs,
            )
            grad_query[:, :, step.first :] += parts[0]
            for total, part in zip(grads.tensors, parts[1:3]):
                total[:, :, : step.end] += part
        grads.pass_on()
    return [t.to(query.dtype) for t in (grad_query, *grads.tensors)]


class _Ring:
    """Tensors that go from each process to the next, as one message.

    Args:
        group: The processes.
        tensors: Those of this one; of the same dtype.
    """

    def __init__(self, group: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._group, self._shapes = group, [t.shape for t in tensors]
        self._flat = torch.cat([t.reshape(-1) for t in tensors])

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Parts on this process now. Writing to them changes the parts passed on."""
        parts = self._flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes)]

    def pass_on(self) -> None:
        """Give them to the next process, and take those of the one before."""
        from torch.distributed import _functional_collectives as collectives

        size = self._group.size()
        received = collectives.permute_tensor(
            self._flat, [(i + 1) % size for i in range(size)], self._group
        )
        self._flat = collectives.wait_tensor(received)


def _merge(
    out: torch.Tensor, logsumexp: torch.Tensor, part: torch.Tensor, sums: torch.Tensor
) -> None:
    """Add the attention to other keys to what is there, in place."""
    total = torch.logaddexp(logsumexp, sums)
    out *= (logsumexp - total).exp()[..., None]
    out += part * (sums - total).exp()[..., None]
    logsumexp.copy_(total)


def _rows(t: torch.Tensor, step: Step) -> torch.Tensor:
    return t[:, :, step.first :]


def _columns(t: torch.Tensor, step: Step) -> torch.Tensor:
    return t[:, :, : step.end]


def _sums_dtype(t: torch.Tensor) -> torch.dtype:
    """In which results of parts are summed."""
    return torch.promote_types(t.dtype, torch.float32)
