"""Tensors as arrays and back, without a copy where a tensor is all of its storage."""

from __future__ import annotations

from typing import Any

import torch

from tpu_core import _C


def array_of(tensor: torch.Tensor) -> Any:
    """The value of a tensor as a `jax.Array`; what was recorded to compute it is sent off."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not _C.is_whole(tensor):
        tensor = _C.own_value(tensor)
    return _C.value_array(tensor, "collective")


def write(tensor: torch.Tensor, array: Any) -> None:
    """Make an array of a tensor's shape and dtype its value."""
    tensor = tensor.detach()
    _C.set_newest(tensor.device.index, array)
    if _is_all_of_its_storage(tensor):
        _C.from_array(array, tensor, False)
        return
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    _C.from_array(array, fresh, False)
    tensor.copy_(fresh)


def _is_all_of_its_storage(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_contiguous()
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )
