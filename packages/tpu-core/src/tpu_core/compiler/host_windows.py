"""Views of CPU tensors by the geometry that recorded ops have (`tpu_core.lowering.views`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpu_core.dtypes import TO_TORCH
from tpu_core.lowering.views import SLICE, WHOLE, Access


def read(base: torch.Tensor, access: Access, starts: Sequence[Any] = ()) -> torch.Tensor:
    """The tensor that ``access`` describes, from its storage's value.

    Args:
        base: The value, of shape ``access.base_sizes``.
        access: Geometry.
        starts: For a window, one start a dim of `Access.starts`.

    Returns:
        A tensor of shape ``access.sizes``, which may share memory with ``base``.
    """
    return base if access.form == WHOLE else _view(_in_memory(base, access), access, starts)


def write(
    base: torch.Tensor, access: Access, value: torch.Tensor, starts: Sequence[Any] = ()
) -> torch.Tensor:
    """The storage's value after ``value`` was written through ``access``; ``base`` stays."""
    if access.form == WHOLE:
        return value
    memory = _in_memory(base, access).clone()
    view = _view(memory, access, starts)
    for dim, (size, stride) in enumerate(zip(access.sizes, access.strides)):
        if stride == 0 and size > 1:  # the last of the repeated elements is the one that stays
            view, value = view.narrow(dim, 0, 1), value.narrow(dim, size - 1, 1)
    view.copy_(value)
    return memory


def _in_memory(base: torch.Tensor, access: Access) -> torch.Tensor:
    """The value with the strides of its storage."""
    if base.stride() == access.base_strides and base.storage_offset() == 0:
        return base
    memory = view = torch.empty_strided(
        access.base_sizes, access.base_strides, dtype=base.dtype, device="cpu"
    )
    for dim, (size, stride) in enumerate(zip(access.base_sizes, access.base_strides)):
        if stride == 0 and size > 1:  # an element that is there once
            view, base = view.narrow(dim, 0, 1), base.narrow(dim, 0, 1)
    view.copy_(base)
    return memory


def _view(memory: torch.Tensor, access: Access, starts: Sequence[Any]) -> torch.Tensor:
    offset = access.offset
    if access.form == SLICE:
        # The offset is one of the op's first run; the starts are this run's.
        places = zip(access.starts(), starts, strict=True)
        offset = sum(int(start) * access.base_strides[dim] for dim, start in places)
    dtype = TO_TORCH[access.dtype]
    return torch.empty(0, dtype=dtype, device="cpu").set_(
        memory.untyped_storage(), offset, access.sizes, access.strides
    )
