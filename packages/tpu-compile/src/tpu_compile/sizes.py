"""Symbolic sizes of a dynamic graph, and their values in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch._dynamo.config as config

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
        varies: Whether the program says that it varies.
        number: Position among the graph's sizes, or None.
        dims: (tensor input, dim) of this size.
    """

    symbol: Any
    origin: tuple[int, str]
    low: int
    high: int | None
    varies: bool
    number: int | None
    dims: tuple[tuple[int, int], ...]


# A size among the inputs, with its position; of a tensor with the dim.
_Place = tuple[Any, int, int | None]


class Symbols:
    """The open sizes of a graph, renamed in the order of its inputs.

    A name that Dynamo chooses depends on what was compiled before; these do not.

    Args:
        numbers: The graph's size inputs.
        tensors: Its tensor inputs.
    """

    def __init__(self, numbers: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        self._renamed: dict[Any, Any] = {}
        self.open: list[Dynamic] = []
        places: list[_Place] = [(n, i, None) for i, n in enumerate(numbers)]
        places += [(n, i, d) for i, t in enumerate(tensors) for d, n in enumerate(t.shape)]
        symbolic = [p for p in places if isinstance(p[0], torch.SymInt)]
        # A backward graph may be given half a size and not the size: then the half is open.
        for wanted in (_is_symbol, self._is_unknown):
            found: dict[Any, list[Any]] = {}
            for place in symbolic:
                if wanted(place[0].node.expr):
                    found.setdefault(place[0].node.expr, []).append(place)
            for expression, at in found.items():
                self._renamed[expression] = sympy.Symbol(f"d{len(self.open)}", integer=True)
                self.open.append(_dynamic(self._renamed[expression], at))
        environments = {id(p[0].node.shape_env): p[0].node.shape_env for p in symbolic}
        guards = [g.expr.xreplace(self._renamed) for e in environments.values() for g in e.guards]
        self._guards = [g for g in guards if self._is_known(g)]

    def _is_known(self, expression: Any) -> bool:
        return bool(expression.free_symbols <= set(self._renamed.values()))

    def _is_unknown(self, expression: Any) -> bool:
        return not self._is_known(expression.xreplace(self._renamed))

    def term(self, value: Any) -> Any:
        """A symbolic number in the graph's own symbols; any other as it is."""
        if not isinstance(value, SYMBOLIC):
            return value
        expression = value.node.expr.xreplace(self._renamed)
        kind = value.node.pytype
        return Term(expression, kind) if expression.free_symbols else kind(expression)

    def known(self, term: Any) -> bool:
        """Whether the inputs say what a term comes to."""
        return not isinstance(term, Term) or self._is_known(term.expression)

    def hold(self, sizes: Sizes) -> bool:
        """Whether the graph was made for sizes like these."""
        return all(sizes.satisfy(g) for g in self._guards)

    def values(self, numbers: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[int]:
        """Values of the open sizes in one call.

        Args:
            numbers: The size inputs.
            shapes: Shapes of the tensor inputs.
        """
        found = []
        for size in self.open:
            if size.number is not None:
                found.append(numbers[size.number])
            else:
                tensor, dim = size.dims[0]
                found.append(shapes[tensor][dim])
        return found

    def bind(self, numbers: Sequence[int], shapes: Sequence[Sequence[int]]) -> Sizes:
        """As `values`, for `Sizes.value`."""
        values = self.values(numbers, shapes)
        return Sizes({size.symbol: n for size, n in zip(self.open, values)})


def _is_symbol(expression: Any) -> bool:
    return bool(expression.is_symbol)


def _dynamic(symbol: Any, places: Sequence[_Place]) -> Dynamic:
    node = places[0][0].node
    found = node.shape_env.bound_sympy(node.expr)
    # Without a bound the range ends at the largest integer.
    high = int(found.upper) if found.upper.is_Integer and found.upper < 2**31 else None
    low = int(found.lower) if found.lower.is_Integer else 0
    number = next((i for _, i, d in places if d is None), None)
    dims = tuple((i, d) for _, i, d in places if d is not None)
    # With `dynamic=True` any size may vary, most of them never do; what does is seen at the second.
    varies = bool(dims) and (high is not None or config.assume_static_by_default)
    return Dynamic(symbol, (id(node.shape_env), str(node.expr)), low, high, varies, number, dims)


class Sizes:
    """Values of a graph's symbols, and of the terms over them."""

    def __init__(self, values: Mapping[Any, int]) -> None:
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

    def satisfy(self, guard: Any) -> bool:
        """Whether a condition on the symbols is met."""
        return bool(guard.xreplace(self._values))

    def all(self, terms: Iterable[Any]) -> tuple[Any, ...]:
        """As `value`, of several."""
        return tuple(map(self.value, terms))
