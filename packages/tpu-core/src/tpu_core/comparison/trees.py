"""Tensors within arguments and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree


def on_device(value: Any) -> Any:
    """A copy of a tensor on the device, its gradient required as before; other values as given."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to("tpu", copy=True).requires_grad_(value.requires_grad)


def on_cpu(value: Any) -> Any:
    """A copy of a tensor on the CPU, its gradient required as before; other values as given."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to("cpu", copy=True).requires_grad_(value.requires_grad)


def in_float64(value: Any) -> Any:
    """A copy of a tensor on the CPU, float64 (complex128) where it is floating point.

    A module is converted in place.
    """
    if isinstance(value, nn.Module):
        return value.double()
    if not isinstance(value, torch.Tensor):
        return value
    return exactly(value).requires_grad_(value.requires_grad)


def exactly(t: torch.Tensor) -> torch.Tensor:
    """The values of a tensor on the CPU, in float64 (complex128) where they are floating point."""
    host = t.detach().to("cpu", copy=True)
    if host.is_complex():
        return host.to(torch.complex128)
    return host.double() if host.is_floating_point() else host


def mapped(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """A pytree with each tensor replaced; one that stands there twice (query is key) does after."""
    made: dict[int, torch.Tensor] = {}

    def once(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in made:
            made[id(t)] = function(t)
        return made[id(t)]

    return _pytree.tree_map_only(torch.Tensor, once, tree)


def differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a pytree in order; those of dataclasses that pytrees do not know, too."""
    found = []
    for leaf in _pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, dict):  # such as the outputs of transformers
            found += tensors(dict(leaf))
    return found
