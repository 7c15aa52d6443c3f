"""Symbolic sizes of a dynamic graph, and their values in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


class Sizes:
    """Value of each symbol.

    Args:
        pairs: Symbolic sizes with their values; a size that is no symbol binds nothing.
    """

    def __init__(self, pairs: Iterable[tuple[Any, int]]) -> None:
        self.values = {
            size.node.expr: value
            for size, value in pairs
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol
        }

    def inside(self, inputs: Sequence[Any], arguments: Sequence[Any]) -> Sizes:
        """The sizes as the body of a loop or branch knows them, with symbols of its own.

        Args:
            inputs: Metadata of the body's inputs.
            arguments: What it is called with.
        """
        own: list[tuple[Any, int]] = []
        for value, given in zip(inputs, arguments, strict=True):
            if isinstance(value, torch.Tensor):
                own += zip(value.shape, given.shape)
            elif isinstance(given, int):
                own.append((value, given))
        found = Sizes(own)
        found.values = self.values | found.values
        return found

    def knows(self, value: Any) -> bool:
        """Whether `concrete` can tell a number; what comes from a tensor's contents it cannot."""
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return True
        return value.node.expr.free_symbols <= self.values.keys()


def concrete(value: Any, sizes: Sizes) -> Any:
    """A number, or what a symbolic one comes to.

    Example:
        >>> concrete(x.shape[0] * 2, sizes)
        14
    """
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    found = value.node.expr.xreplace(sizes.values)
    if isinstance(value, torch.SymInt):
        return int(found)
    return bool(found) if isinstance(value, torch.SymBool) else float(found)
