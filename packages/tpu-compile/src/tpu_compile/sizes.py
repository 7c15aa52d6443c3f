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
class Term:
    """A number that follows from the sizes.

    Attributes:
        expression: Over the graph's own symbols.
        kind: ``int``, ``float`` or ``bool``.
    """

    expression: Any
    kind: type

    def __str__(self) -> str:
        return f"{self.kind.__name__}({self.expression})"


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A size that a graph leaves open.

    Attributes:
        symbol: Its name in the graph's expressions.
        origin: What it is called in the program: equal in a forward graph and its backward.
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
    """The open sizes of a graph, renamed in the order of its inputs.

    A name that Dynamo chooses depends on what was compiled before; these do not.

    Args:
        numbers: The graph's size inputs.
        tensors: Its tensor inputs.
    """

    def __init__(self, numbers: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        self._renamed: dict[Any, sympy.Symbol] = {}
        at: dict[Any, tuple[torch.SymInt, int | None, list[tuple[int, int]]]] = {}
        for position, number in enumerate(numbers):
            if is_symbol(number):
                at.setdefault(number.node.expr, (number, position, []))
        for index, tensor in enumerate(tensors):
            for dim, size in enumerate(tensor.shape):
                if is_symbol(size):
                    at.setdefault(size.node.expr, (size, None, []))[2].append((index, dim))
        for symbol in at:
            self._renamed[symbol] = sympy.Symbol(f"d{len(self._renamed)}", integer=True)
        self.open = [
            _dynamic(self._renamed[symbol], size, number, tuple(dims))
            for symbol, (size, number, dims) in at.items()
        ]

    def term(self, value: Any) -> Any:
        """A symbolic number in the graph's own symbols; any other as it is."""
        if not isinstance(value, SYMBOLIC):
            return value
        expression = value.node.expr.xreplace(self._renamed)
        kind = value.node.pytype
        return Term(expression, kind) if expression.free_symbols else kind(expression)

    def known(self, term: Any) -> bool:
        """Whether the inputs say what a term comes to."""
        return not isinstance(term, Term) or term.expression.free_symbols <= set(
            self._renamed.values()
        )

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
    """Values of a graph's symbols, and of the terms over them."""

    def __init__(self, values: Mapping[sympy.Symbol, int]) -> None:
        self._values = {s: sympy.Integer(n) for s, n in values.items()}
        self._terms: dict[Term, Any] = {}

    def value(self, term: Any) -> Any:
        """A number, or what a term comes to.

        Example:
            >>> sizes.value(Term(2 * d0, int))
            14
        """
        if not isinstance(term, Term):
            return term
        if term not in self._terms:
            self._terms[term] = term.kind(term.expression.xreplace(self._values))
        return self._terms[term]

    def all(self, terms: Iterable[Any]) -> tuple[Any, ...]:
        """As `value`, of several."""
        return tuple(map(self.value, terms))
