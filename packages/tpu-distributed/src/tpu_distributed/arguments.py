"""Arguments that collectives refuse, in the words of PyTorch's backends for the CPU.

Ranks wait for one whose arguments are refused: `Group.refuse` lets them know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Refusing(Protocol):
    """A group, as far as its arguments go."""

    size: int

    def refuse(self, kind: str, error: Exception, timeout: float | None) -> Any:
        """Raise an error once the other ranks know."""


def require_root(group: Refusing, kind: str, root: int, timeout: float | None) -> None:
    """Refuse a root that is no rank of the group.

    Args:
        group: Its size counts.
        kind: Of the collective.
        root: The rank that is to send or receive.
        timeout: Seconds to wait for the other ranks.

    Raises:
        RuntimeError: The root is no rank of the group.
    """
    if not 0 <= root < group.size:
        text = f"{kind}: invalid root rank: {root}. The group has {group.size} ranks, from 0 on."
        group.refuse(kind, RuntimeError(text), timeout)


def require_items(
    group: Refusing,
    kind: str,
    what: str,
    lists: Sequence[Sequence[torch.Tensor]],
    timeout: float | None,
) -> None:
    """Refuse lists that do not have a tensor for each rank.

    Args:
        group: Its size is the number of tensors.
        kind: Of the collective.
        what: "input" or "output".
        lists: The lists.
        timeout: Seconds to wait for the other ranks.

    Raises:
        RuntimeError: A list has another length.
    """
    for i, items in enumerate(lists):
        if len(items) != group.size:
            text = (
                f"{kind}: invalid {what} tensor list at index {i} (expected length {group.size}, "
                f"got {len(items)})"
            )
            group.refuse(kind, RuntimeError(text), timeout)


def require_peer(group: Refusing, kind: str, rank: int) -> None:
    """Refuse a message to or from what is no rank of the group.

    Raises:
        RuntimeError: It is none.
    """
    if not 0 <= rank < group.size:
        raise RuntimeError(
            f"{kind}: invalid rank: {rank}. The group has {group.size} ranks, from 0 on."
        )
