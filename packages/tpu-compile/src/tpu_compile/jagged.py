"""Lengths of jagged dims: numbers that stand for the many lengths of a nested tensor.

A graph works on the values of such a tensor, whose sizes are plain. It is given the length and
gives it back, as the size and in the strides of results, and computes nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# In place of a length, in a call's sizes: no tensor of the graph has it.
_ANY = 2


class JaggedSizes:
    """The lengths of jagged dims in a call.

    Args:
        lengths: By the expression that has the length in the graph.
    """

    def __init__(self, lengths: dict[Any, torch.SymInt]) -> None:
        self._lengths = lengths

    def __bool__(self) -> bool:
        return bool(self._lengths)

    def has(self, value: Any) -> bool:
        """Return whether a number of the graph is a length, or a multiple of one."""
        return isinstance(value, torch.SymInt) and self._length_in(value) is not None

    def value(self, value: Any) -> Any:
        """The multiple of a length that a number is in the call.

        Args:
            value: A number for which `has` is true.
        """
        length = self._length_in(value)
        return self._lengths[length] * int(value.node.expr / length)

    def _length_in(self, value: Any) -> Any:
        expression = value.node.expr
        return next((x for x in self._lengths if (expression / x).is_Integer), None)


def jagged_sizes(given: Sequence[Any], counts: Sequence[Any]) -> tuple[list[int], JaggedSizes]:
    """The sizes of a call, with a number of no meaning in place of lengths of jagged dims.

    Args:
        given: Its numbers.
        counts: The same numbers in the graph.
    """
    lengths = {
        c.node.expr: n for n, c in zip(given, counts, strict=True) if isinstance(n, torch.SymInt)
    }
    return list(map(plain_size, given)), JaggedSizes(lengths)


def plain_size(given: Any) -> int:
    """A number of a call, or one of no meaning in place of the length of a jagged dim."""
    return _ANY if isinstance(given, torch.SymInt) else int(given)
