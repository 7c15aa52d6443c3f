"""`fully_shard`'s ``reshard_after_forward``: what the backward pass needs is gathered again there.

Autograd keeps a gathered parameter for the gradient of what it was multiplied with. In its place
the divided one is kept, and gathered behind the gradient of the module's output, so that XLA can
neither use the first gather twice nor do the second early.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from tpu_compile.aot import sharding_ops


@dataclass(frozen=True)
class _Gather:
    """Record of a gathered parameter: from what, to what, for which call of `fully_shard`."""

    gathered: torch.Tensor
    part: torch.Tensor
    whole: sharding_ops.TensorSharding
    group: int


@dataclass(frozen=True)
class _Again:
    """Kept by autograd for a gathered parameter, or for its transpose."""

    gather: _Gather
    is_transposed: bool


class Resharding:
    """Gathers parameters again in the backward pass of a traced program."""

    def __init__(self) -> None:
        self._gathers: dict[int, _Gather] = {}  # by identity: gathers keep their tensors
        self._grads: dict[int, torch.Tensor] = {}

    def saving(self) -> AbstractContextManager[Any]:
        """While the forward pass is traced in the block, autograd keeps parts of parameters."""
        hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
            self._pack, self._unpack
        )
        return hooks

    @staticmethod
    def recomputing() -> AbstractContextManager[Any]:
        """While what is traced in the block runs in the backward pass alone, and gathers once."""
        hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
            _plain, lambda kept: kept
        )
        return hooks

    def gathered(
        self,
        gathered: torch.Tensor,
        part: torch.Tensor,
        whole: sharding_ops.TensorSharding,
        group: int,
    ) -> None:
        """Say that ``gathered`` can be made again.

        Args:
            gathered: The parameter as its module uses it.
            part: The parameter as it is kept.
            whole: Partition spec of ``gathered``.
            group: Those gathered at once in the backward pass.
        """
        self._gathers[id(gathered)] = _Gather(gathered, part.detach(), whole, group)

    def returned(self, output: Any, group: int) -> None:
        """Say what a module of a group returned: from its gradient on parameters are needed."""
        for value in tree_flatten(output)[0]:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(functools.partial(self._grads.__setitem__, group))

    def _pack(self, tensor: torch.Tensor) -> Any:
        base = tensor._base if tensor._is_view() else tensor
        gather = self._gathers.get(id(base))
        if gather is not None:
            whole = gather.gathered
            if tensor is whole:
                return _Again(gather, False)
            if whole.dim() == 2 and _geometry(tensor) == _geometry(whole.t()):
                return _Again(gather, True)
        return _plain(tensor)

    def _unpack(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, _Again):
            value: torch.Tensor = kept
            return value
        gather = kept.gather
        part = gather.part
        if gather.group in self._grads:
            part = sharding_ops.behind(part, self._grads[gather.group])
        again = sharding_ops.divide(part, gather.whole, None)
        return again.t() if kept.is_transposed else again


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    # A result that its own node keeps would keep the node.
    return tensor.detach() if tensor.grad_fn is not None else tensor
