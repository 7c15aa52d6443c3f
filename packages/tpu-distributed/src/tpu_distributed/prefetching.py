"""Batches that are on the device before the step that takes them.

No stream or event is needed: a transfer is not an op in the device's queue, and each program waits
for what it reads. An event would cut the trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch.utils import _pytree as pytree

from tpu_core.extend import DeviceValue

Batch = TypeVar("Batch")


class Prefetcher(Generic[Batch]):
    """The batches of a loader, on a device; made by `prefetch`."""

    def __init__(self, loader: Iterable[Batch], device: torch.device, depth: int) -> None:
        self.loader, self.device, self.depth = loader, device, depth

    def __len__(self) -> int:
        loader: Any = self.loader  # of an iterable without a length this raises, as it would itself
        return len(loader)

    def __iter__(self) -> Iterator[Batch]:
        source = iter(self.loader)
        ahead: deque[Batch] = deque()
        end: Exception | None = None
        while True:
            # By now the step before is on its way: what follows runs on the host beside it.
            while end is None and len(ahead) <= self.depth:
                try:
                    ahead.append(_to(next(source), self.device))
                except Exception as error:  # that there is no more, or another: raised in its turn
                    end = error
            if ahead:
                yield ahead.popleft()
            elif isinstance(end, StopIteration):
                return
            else:
                assert end is not None
                raise end


def prefetch(
    loader: Iterable[Batch], device: torch.device | str, depth: int = 2
) -> Prefetcher[Batch]:
    """Move batches to a device ahead of their use.

    While the device computes a step, the next batches are taken from the loader and sent; the host
    waits for no transfer. Workers of a `DataLoader` make batches in parallel as ever.

    Args:
        loader: A `DataLoader`, or any iterable. Each iteration begins it anew. A batch is a tensor,
            a structure of them as of PyTorch's collate functions, or has a method ``to``; whatever
            else is in it stays as it is.
        device: Target device.
        depth: Batches that are there besides the one in use. They take memory of the device.

    Returns:
        An iterable of the batches in order, with the loader's length. What the loader raises is
        raised after the batches before it.

    Raises:
        ValueError: ``depth`` is below 1.

    Example:
        >>> for x, y in tpu_distributed.prefetch(loader, "tpu"):
        ...     step(x, y)
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, not {depth}.")
    return Prefetcher(loader, torch.device(device), depth)


def _to(batch: Any, device: torch.device) -> Any:
    moved = pytree.tree_map(lambda leaf: _leaf_to(leaf, device), batch, is_leaf=_moves_itself)
    if device.type == "tpu":
        for leaf in pytree.tree_leaves(moved, is_leaf=_moves_itself):
            for tensor in leaf.values() if isinstance(leaf, Mapping) else (leaf,):
                if _waits_on_the_host(tensor):
                    DeviceValue(tensor).array("prefetch")
    return moved


def _waits_on_the_host(value: Any) -> bool:
    """Return whether a tensor of the device would be sent only when the first op reads it."""
    is_ours = isinstance(value, torch.Tensor) and value.device.type == "tpu"
    return is_ours and DeviceValue(value).state == "host"


def _moves_itself(value: Any) -> bool:
    return callable(getattr(value, "to", None))


def _leaf_to(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device, non_blocking=True) if _moves_itself(leaf) else leaf
