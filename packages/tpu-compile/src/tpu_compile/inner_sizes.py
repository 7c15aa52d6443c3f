"""Sizes of tensors inside of a graph that are no sums or products of its operands' sizes.

What a strided convolution, a pooling or half a spectrum makes of a size, ``(n - 3) // 2 + 1``, is
no size of a tensor outside of the graph where only a mean of it is returned; nor is an integer that
a tensor is made of. The programs of buckets are given their values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from tpu_compile.numbers import is_from_zero
from tpu_compile.sizes import Symbols, is_known

# Values of as many calls are kept: sympy takes as long for one as the rest of a call.
_MOST_CALLS = 1024


class InnerSizes:
    """Expressions of sizes, and their values in a call.

    Args:
        module: The graph.
        symbols: The sizes that it leaves open.

    Example:
        >>> InnerSizes(module, symbols).values((37,))  # of x[::2]
        (19,)
    """

    def __init__(self, module: GraphModule, symbols: Symbols) -> None:
        self._symbols = symbols
        self._expressions = list(dict.fromkeys(_inner(module, symbols)))
        self.values = functools.lru_cache(maxsize=_MOST_CALLS)(self._values)

    def __len__(self) -> int:
        return len(self._expressions)

    def _values(self, values: Sequence[int]) -> tuple[int, ...]:
        sizes = self._symbols.sizes(values)
        return tuple(map(sizes.integer, self._expressions))


def _inner(module: GraphModule, symbols: Symbols) -> Iterator[Any]:
    """Sizes that a call gives as integers alone, and factors of sizes and places that hold a
    function, such as a division that is rounded.
    """
    known = symbols.known
    yield from (d.expression for d in symbols.open if not d.dims)
    for node in module.graph.nodes:
        for size in _sizes_of(node):
            for factor in sympy.Mul.make_args(size.node.expr):
                is_function = bool(factor.atoms(sympy.Function)) and factor not in known
                if is_function and is_known(factor, known):
                    yield factor


def _sizes_of(node: Node) -> Iterator[Any]:
    """The symbolic sizes of the tensors that a node makes, or the size or place that it is."""
    for value in tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            yield from (n for n in value.shape if isinstance(n, torch.SymInt))
        elif isinstance(value, torch.SymInt) and is_from_zero(node) and _is_argument(node):
            yield value


def _is_argument(node: Node) -> bool:
    """Return whether an op takes an integer, and not only Python's arithmetic."""
    return any(isinstance(user.target, torch._ops.OpOverload) for user in node.users)
