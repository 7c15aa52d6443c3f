"""Steps that make new memory from old, and steps that only look."""

from __future__ import annotations

import copy as copying
from collections.abc import Sequence

import torch

from .hazards import convertible, exact, small
from .worlds import Picks, StepFunction, World

Tensors = Sequence[torch.Tensor]


def clone(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    if p.below(2):
        return [t.clone(memory_format=torch.contiguous_format)]
    return [t.clone()]


def contiguous(w: World, p: Picks) -> Tensors:
    return [w.pick(p).contiguous()]


def channels_last(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return [t.contiguous(memory_format=torch.channels_last)]


def deepcopy(w: World, p: Picks) -> Tensors:
    return [copying.deepcopy(w.pick(p))]


def deepcopy_together(w: World, p: Picks) -> Tensors:
    return copying.deepcopy([w.pick(p), w.pick(p)])


def convert(w: World, p: Picks) -> Tensors:
    t, dtype = w.pick(p), p.of((torch.float32, torch.int32, torch.bool, torch.int64))
    w.require(lambda: convertible(t, dtype) and not (t.is_complex() and not dtype.is_complex))
    return [t.to(dtype)]


def add(w: World, p: Picks) -> Tensors:
    a, b = w.pick(p), w.pick(p)
    exact(w, torch.add, a, b)
    return [a + b]


def multiply(w: World, p: Picks) -> Tensors:
    a, b = w.pick(p), w.pick(p)
    exact(w, torch.mul, a, b)
    return [a * b]


def compare(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    w.require(lambda: small(t) and not t.is_complex())
    return [t > 2]


def where(w: World, p: Picks) -> Tensors:
    a, b = w.pick(p), w.pick(p)
    mask = w.tensor(torch.tensor([True, False]))
    w.require(lambda: a.dtype == b.dtype)
    return [torch.where(mask[p.below(2)], a, b)]


def concatenate(w: World, p: Picks) -> Tensors:
    a, b = w.pick(p), w.pick(p)
    w.require(lambda: a.dtype == b.dtype)
    return [torch.stack([a, b], p.dim(a)) if p.below(2) else torch.cat([a, b], p.dim(a))]


def sum_over_a_dim(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    exact(w, torch.sum, t)
    return [t.sum(p.dim(t), keepdim=bool(p.below(2)))]


def like(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return [p.of((torch.zeros_like, torch.ones_like))(t)]


def index(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    w.require(lambda: t.dim() > 0 and t.size(0) > 0)
    return [t[w.tensor(torch.tensor([0, t.size(0) - 1]))]]


def read(w: World, p: Picks) -> Tensors:
    """A host read in the middle of the program, which cuts the trace."""
    t = w.pick(p)
    return [w.tensor(t.cpu())]


def read_an_element(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    w.require(lambda: t.numel() > 0)
    return [w.tensor(torch.tensor(t.flatten()[0].item(), dtype=t.dtype))]


def synchronize(w: World, p: Picks) -> Tensors:
    if w.device == "tpu":
        torch.tpu.synchronize()
    return []


def drop(w: World, p: Picks) -> Tensors:
    """The program lets go of a tensor."""
    if len(w.tensors) > 1:
        del w.tensors[p.below(len(w.tensors))]
    return []


OTHERS: tuple[StepFunction, ...] = (
    clone, contiguous, channels_last, deepcopy, deepcopy_together, convert, add, multiply, compare,
    where, concatenate, sum_over_a_dim, like, index, read, read_an_element, synchronize, drop,
)  # fmt: skip
