"""Steps that change the elements that indices or masks choose."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .hazards import convertible, exact, has_repeats, overlap, same_place, writable, written
from .worlds import Picks, StepFunction, World

Tensors = Sequence[torch.Tensor]


def set_item(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    index = p.of((0, -1, slice(1, None), slice(None, None, 2), Ellipsis, (Ellipsis, 0), None))
    written(w, t)
    t[index] = p.below(9)
    return []


def set_item_from_tensor(w: World, p: Picks) -> Tensors:
    t, value = w.pick(p), w.pick(p)
    index = p.of((0, -1, slice(1, None), slice(None, None, 2), Ellipsis, (Ellipsis, 0)))
    w.require(lambda: convertible(value, t.dtype) and writable(t, value) and not overlap(t, value))
    t[index] = value
    return []


def set_item_by_indices(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    w.require(lambda: t.dim() > 0 and t.size(0) > 0 and not has_repeats(t))
    index = w.tensor(torch.tensor([p.below(max(t.size(0), 1))]))
    if p.below(2):
        t[index] = p.below(9)
    else:
        t.index_put_((index,), torch.full((), 2, dtype=t.dtype, device=w.device), accumulate=False)
    return []


def accumulate_by_indices(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    w.require(lambda: t.dim() > 0 and t.size(0) > 0 and not has_repeats(t))
    exact(w, lambda x: x + 2, t)
    index = w.tensor(torch.tensor([0, t.size(0) - 1, 0][: 1 + p.below(3)]))
    t.index_put_((index,), torch.ones((), dtype=t.dtype, device=w.device), accumulate=True)
    return []


def set_item_by_mask(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    w.require(lambda: not has_repeats(t))
    mask = w.tensor((torch.arange(t.numel()) % 2 == 0).reshape(t.shape))
    t[mask] = p.below(9)
    return []


def masked_fill(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    shape = p.of((t.shape, t.shape[-1:], (5,)))
    mask = w.tensor((torch.arange(max(torch.Size(shape).numel(), 0)) % 3 == 0).reshape(shape))
    w.require(lambda: not has_repeats(t))
    t.masked_fill_(mask, p.below(9))
    return []


def masked_fill_by_a_tensor(w: World, p: Picks) -> Tensors:
    t, mask = w.pick(p), w.pick(p)
    w.require(lambda: mask.dtype == torch.bool and writable(t, mask))
    t.masked_fill_(mask, 3)
    return []


def index_fill(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    w.require(lambda: t.dim() > 0 and t.numel() > 0 and not has_repeats(t))
    d = p.below(t.dim())
    t.index_fill_(d, w.tensor(torch.tensor([0])), 4)
    return []


def scatter(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    w.require(
        lambda: t.dim() == 1 and t.numel() > 1 and not same_place(t, t[:1]) and not has_repeats(t)
    )
    index = w.tensor(torch.tensor([1, 0]))
    t.scatter_(0, index, torch.full((2,), 5, dtype=t.dtype, device=w.device))
    return []


INDEXED_WRITES: tuple[StepFunction, ...] = (
    set_item, set_item_from_tensor, set_item_by_indices, accumulate_by_indices, set_item_by_mask,
    masked_fill, masked_fill_by_a_tensor, index_fill, scatter,
)  # fmt: skip
