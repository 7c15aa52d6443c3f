"""When a step's result is defined and exact, so that the CPU and the device must agree on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .worlds import World


def elements(t: torch.Tensor) -> set[int]:
    """Byte offsets of the elements that ``t`` shows."""
    n = t.untyped_storage().nbytes() // t.element_size()
    index = torch.arange(n).as_strided(t.shape, t.stride(), t.storage_offset())
    size = t.element_size()
    return {i * size + k for i in index.flatten().tolist() for k in range(size)}


def has_repeats(t: torch.Tensor) -> bool:
    """Whether an element of memory is seen twice; PyTorch refuses a write there or leaves it
    undefined."""
    return t.numel() != 0 and len(elements(t)) != t.numel() * t.element_size()


def unseen_repeats(t: torch.Tensor) -> bool:
    """Repeats that PyTorch's check does not see: none of them is an expanded dim."""
    return has_repeats(t) and not any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride()))


def same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (
        b.data_ptr(),
        b.shape,
        b.stride(),
        b.dtype,
    )


def dense(t: torch.Tensor) -> bool:
    return torch.ops.aten.is_non_overlapping_and_dense(t)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    shared = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return shared and bool(elements(a) & elements(b))


def unseen_overlap(written: torch.Tensor, read: torch.Tensor) -> bool:
    """A partial overlap that PyTorch's check does not see: the order of elements would decide."""
    if same_place(written, read) or not overlap(written, read):
        return False
    return not (dense(written) and dense(read))


def writable(written: torch.Tensor, *read: torch.Tensor) -> bool:
    """Whether a write is defined, or refused by PyTorch."""
    return not unseen_repeats(written) and not any(unseen_overlap(written, r) for r in read)


def small(t: torch.Tensor) -> bool:
    """Every value is exact in every dtype and stays so for a while; no negative zero."""
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    if not t.numel() or t.dtype == torch.bool:
        return True
    if t.is_floating_point():
        fine = bool((t.isfinite() & (t == t.round())).all())
        return fine and bool((t.abs() <= 64).all()) and not bool((t.signbit() & (t == 0)).any())
    return bool(((t <= 64) & (t >= -64)).all()) if t.dtype != torch.uint8 else bool((t <= 64).all())


def convertible(source: torch.Tensor, target: torch.dtype) -> bool:
    """Whether a conversion to ``target`` is defined and exact."""
    if source.dtype == target:
        return True
    unsigned = target == torch.uint8 and not source.is_complex() and source.dtype != torch.bool
    return small(source) and not (unsigned and bool((source < 0).any()))


def exact(w: World, op: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Leave the step out where rounding, overflow or the sign of zero would decide."""

    def holds() -> bool:
        if not all(small(t) for t in tensors):
            return False
        try:
            result = op(*(t.clone() for t in tensors))
        except RuntimeError:
            return True  # both worlds shall refuse
        return not isinstance(result, torch.Tensor) or small(result)

    w.require(holds)


def written(w: World, t: torch.Tensor, *read: torch.Tensor) -> None:
    w.require(lambda: writable(t, *read))
