"""Batched tensors of PyTorch's first vmap, which `torch.func.vmap` has replaced but for two places.

`torch.autograd.grad` uses it for ``is_grads_batched=True``, and so do the vectorized Jacobians of
`torch.autograd.functional`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def innermost_level(tensors: Iterable[torch.Tensor | None]) -> int:
    """The level of the innermost vmap that a tensor is batched by.

    The level of the vmap that runs is not it: a backward pass may run in another thread.
    """
    return max(_level(t) for t in tensors if t is not None)


def _level(t: torch.Tensor) -> int:
    level = 0
    while torch._C._functorch.is_legacy_batchedtensor(t):
        level += 1
        t = unbatched(t, level)[0]
    return level


def unbatched(t: torch.Tensor, level: int) -> tuple[torch.Tensor, bool]:
    """The tensor with its dim of a level in front, and whether it has one; else as it is."""
    # PyTorch expands a tensor without the dim to the size that it is given.
    one, two = (torch._remove_batch_dim(t, level, size, 0) for size in (1, 2))
    return (one, True) if one.shape == two.shape else (t, False)


def batched(t: torch.Tensor, level: int) -> torch.Tensor:
    """The tensor with its first dim as that of a level."""
    return torch._add_batch_dim(t, 0, level)
