"""Steps that change which memory a tensor shows, and its size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .worlds import Picks, StepFunction, World

Tensors = Sequence[torch.Tensor]


def set_to(w: World, p: Picks) -> Tensors:
    t, source = w.pick(p), w.pick(p)
    w.require(lambda: t.is_conj() == source.is_conj())
    t.set_(source)
    return []


def set_to_part_of_a_storage(w: World, p: Picks) -> Tensors:
    t, source = w.pick(p), w.pick(p)
    w.require(lambda: t.dtype == source.dtype and t.is_conj() == source.is_conj())
    n = source.untyped_storage().nbytes() // t.element_size()
    w.require(lambda: n >= 3)
    t.set_(source.untyped_storage(), p.maybe_wrong(1, -1), (2,), (1 + p.below(2) if n > 3 else 1,))
    return []


def resize(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    storage = t.untyped_storage()
    before = storage.nbytes()
    t.resize_(p.of(((2, 3), (4,), (1,), (0,), (2, 2, 2), (3, 1))))
    _define(w, storage, before)
    return []


def resize_bytes(w: World, p: Picks) -> Tensors:
    """A storage that is emptied and comes back, as FSDP frees parameters."""
    t = w.pick(p)
    storage = t.untyped_storage()
    before = storage.nbytes()
    storage.resize_(0)
    storage.resize_(before)
    _define(w, storage, 0)
    return []


def _define(w: World, storage: torch.UntypedStorage, first: int) -> None:
    """Give bytes from ``first`` on a value: on the CPU they are whatever was there."""
    if storage.nbytes() > first:
        empty = torch.empty(0, dtype=torch.uint8, device=w.device)
        empty.set_(storage, first, (storage.nbytes() - first,), (1,)).zero_()


def assign_data(w: World, p: Picks) -> Tensors:
    t, source = w.pick(p), w.pick(p)
    w.require(lambda: t.dtype == source.dtype and t.is_conj() == source.is_conj())
    t.data = source
    return []


def change_geometry(w: World, p: Picks) -> Tensors:
    """In-place view ops."""
    t = w.pick(p)
    kind = p.below(6)
    if kind == 0:
        t.t_()
    elif kind == 1:
        t.transpose_(p.dim(t), p.dim(t))
    elif kind == 2:
        t.unsqueeze_(p.below(t.dim() + 1))
    elif kind == 3:
        t.squeeze_()
    elif kind == 4:
        t.as_strided_((2,), (p.of((1, 2)),))
    else:
        t.swapaxes_(p.dim(t), p.dim(t))
    return []


STORAGE_CHANGES: tuple[StepFunction, ...] = (
    set_to, set_to_part_of_a_storage, resize, resize_bytes, assign_data, change_geometry,
)  # fmt: skip
