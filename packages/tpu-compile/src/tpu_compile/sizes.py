"""Symbolic sizes of a dynamic graph, and their values in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils._sympy.value_ranges import ValueRanges

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A size that a graph leaves open.

    Attributes:
        symbol: What it is called in the graph's metadata.
        origin: The program's name for it: equal in a forward graph and its backward.
        low, high: Its range; `high` is None where the program sets no bound.
        number: Position among the graph's sizes, or None.
        dims: (tensor input, dim) of this size.
    """

    symbol: sympy.Symbol
    origin: tuple[int, str]
    low: int
    high: int | None
    number: int | None
    dims: tuple[tuple[int, int], ...]


class Symbols:
    """The open sizes of a graph.

    Args:
        numbers: The graph's size inputs.
        tensors: Its tensor inputs.

    Attributes:
        open: The sizes.
        known: Their symbols.
    """

    def __init__(self, numbers: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        at: dict[Any, tuple[torch.SymInt, int | None, list[tuple[int, int]]]] = {}
        for position, number in enumerate(numbers):
            if is_symbol(number):
                at.setdefault(number.node.expr, (number, position, []))
        for index, tensor in enumerate(tensors):
            for dim, size in enumerate(tensor.shape):
                if is_symbol(size):
                    at.setdefault(size.node.expr, (size, None, []))[2].append((index, dim))
        self.open = [
            _dynamic(symbol, size, number, tuple(dims))
            for symbol, (size, number, dims) in at.items()
        ]
        self.known = set(at)
        self._names = {s: sympy.Symbol(f"d{i}", integer=True) for i, s in enumerate(at)}

    def text(self, value: Any) -> str:
        """A number as text that is the same in every process.

        Args:
            value: A number, symbolic or not, or another argument of a node.
        """
        if not isinstance(value, SYMBOLIC):
            return f"{type(value).__name__}:{value}"
        # A name that Dynamo chooses depends on what was compiled before; one by order does not.
        for symbol in sorted(value.node.expr.free_symbols, key=str):
            if symbol not in self._names:
                self._names[symbol] = sympy.Symbol(f"d{len(self._names)}", integer=True)
        expression = value.node.expr.xreplace(self._names)
        return f"{value.node.pytype.__name__}:{expression}"

    def bind(self, numbers: Sequence[int], shapes: Sequence[Sequence[int]]) -> Sizes:
        """Values in one call.

        Args:
            numbers: The size inputs.
            shapes: Shapes of the tensor inputs.
        """
        values = {}
        for size in self.open:
            if size.number is not None:
                values[size.symbol] = numbers[size.number]
            else:
                tensor, dim = size.dims[0]
                values[size.symbol] = shapes[tensor][dim]
        return Sizes(values)


def is_symbol(value: Any) -> bool:
    """Whether a size is a symbol itself, not something that follows from one."""
    return isinstance(value, torch.SymInt) and bool(value.node.expr.is_symbol)


def _dynamic(
    symbol: sympy.Symbol, size: torch.SymInt, number: int | None, dims: tuple[tuple[int, int], ...]
) -> Dynamic:
    node = size.node
    found: ValueRanges[Any] = node.shape_env.var_to_range[node.expr]
    # Without a bound the range ends at the largest integer.
    high = int(found.upper) if found.upper.is_Integer and found.upper < 2**31 else None
    low = int(found.lower) if found.lower.is_Integer else 0
    return Dynamic(symbol, (id(node.shape_env), str(node.expr)), low, high, number, dims)


class Sizes:
    """Values of a graph's symbols, and of what follows from them.

    Args:
        values: By symbol.
    """

    def __init__(self, values: Mapping[Any, int]) -> None:
        self._values = {s: sympy.Integer(n) for s, n in values.items()}
        self._found: dict[Any, Any] = {}

    def value(self, number: Any) -> Any:
        """A number, or what a symbolic one comes to.

        Example:
            >>> sizes.value(x.shape[0] * 2)
            14
        """
        if not isinstance(number, SYMBOLIC):
            return number
        expression, kind = number.node.expr, number.node.pytype
        if (expression, kind) not in self._found:
            self._found[expression, kind] = kind(expression.xreplace(self._values))
        return self._found[expression, kind]

    def all(self, numbers: Iterable[Any]) -> tuple[Any, ...]:
        """As `value`, of several."""
        return tuple(map(self.value, numbers))

    def knows(self, number: Any) -> bool:
        """Whether `value` can tell a number; what comes from a tensor's contents it cannot."""
        return not isinstance(number, SYMBOLIC) or (
            number.node.expr.free_symbols <= self._values.keys()
        )

    def inside(self, inputs: Sequence[Any], arguments: Sequence[Any]) -> Sizes:
        """The sizes as the body of a loop or branch knows them, with symbols of its own.

        Args:
            inputs: Metadata of the body's inputs.
            arguments: What it is called with.
        """
        own: dict[Any, int] = {}
        for value, given in zip(inputs, arguments, strict=True):
            if isinstance(value, torch.Tensor):
                pairs = [*zip(value.shape, given.shape)]
            else:
                pairs = [(value, given)] if isinstance(given, int) else []
            own.update((size.node.expr, n) for size, n in pairs if is_symbol(size))
        return Sizes({**self._values, **own})
