"""Symbolic sizes of a dynamic graph, and their values in one call."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch._dynamo.config as config
from jax.export import is_symbolic_dim

# Functions of PyTorch's size expressions, as JAX's symbolic dims know them.
_DIM_FUNCTIONS = {"FloorDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod}

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A size that a graph leaves open.

    Attributes:
        expression: Its name in the graph's metadata: a symbol, as a rule.
        origin: Its name in the program: equal in a forward graph and its backward.
        low, high: Its range; `high` is None where the program sets no bound.
        varies: Whether the program says that it varies.
        number: Position among the graph's sizes, or None.
        dims: (tensor input, dim) of this size.
    """

    expression: Any
    origin: tuple[int, str]
    low: int
    high: int | None
    varies: bool
    number: int | None
    dims: tuple[tuple[int, int], ...]


# A size among the inputs, with its position; of a tensor with the dim.
_Place = tuple[Any, int, int | None]


class Symbols:
    """The open sizes of a graph.

    Args:
        numbers: The graph's size inputs.
        tensors: Its tensor inputs.

    Attributes:
        numbers: As given.
        open: The sizes.
        known: Their expressions.
    """

    def __init__(self, numbers: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        self.numbers = numbers
        self.open: list[Dynamic] = []
        self.known: set[Any] = set()
        places: list[_Place] = [(n, i, None) for i, n in enumerate(numbers)]
        places += [(n, i, d) for i, t in enumerate(tensors) for d, n in enumerate(t.shape)]
        symbolic = [p for p in places if isinstance(p[0], torch.SymInt)]
        # A backward graph may be given half a size and not the size: then the half is open.
        for wanted in (_is_symbol, lambda e: not is_known(e, self.known)):
            found: dict[Any, list[_Place]] = {}
            for place in symbolic:
                if wanted(place[0].node.expr):
                    found.setdefault(place[0].node.expr, []).append(place)
            self.open += (_dynamic(at) for at in found.values())
            self.known.update(found)
        environments = {id(p[0].node.shape_env): p[0].node.shape_env for p in symbolic}
        guards = [g.expr for e in environments.values() for g in e.guards]
        self._guards = [g for g in guards if is_known(g, self.known)]
        self._names = {d.expression: _name(i) for i, d in enumerate(self.open)}

    def text(self, value: Any) -> str:
        """A number as text that is the same in every process.

        Args:
            value: A number, symbolic or not, or another argument of a node.
        """
        if not isinstance(value, SYMBOLIC):
            return f"{type(value).__name__}:{value}"
        # A name that Dynamo chooses depends on what was compiled before; one by order does not.
        expression = value.node.expr.xreplace(self._names)
        given = set(self._names.values())
        for symbol in sorted(expression.free_symbols - given, key=str):
            self._names[symbol] = _name(len(self._names))
        return f"{value.node.pytype.__name__}:{expression.xreplace(self._names)}"

    def hold(self, sizes: Sizes) -> bool:
        """Return whether the graph was made for sizes like these."""
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

    def sizes(self, values: Sequence[int]) -> Sizes:
        """Sizes derived from values of the dynamic sizes."""
        return Sizes({d.expression: n for d, n in zip(self.open, values, strict=True)})

    def bind(self, numbers: Sequence[int], shapes: Sequence[Sequence[int]]) -> Sizes:
        """Sizes derived from a call's arguments, see `values`."""
        return self.sizes(self.values(numbers, shapes))


def hint(number: Any) -> Any:
    """A number, or the value that a symbolic one has in the trace.

    Raises:
        ValueError: It has none.
    """
    if not isinstance(number, SYMBOLIC):
        return number
    if not number.node.has_hint():
        raise ValueError(f"{number} has no value in the trace")
    return number.node.hint


def is_symbol(value: Any) -> bool:
    """Return whether a size is a symbol itself, not something that follows from one."""
    return isinstance(value, torch.SymInt) and _is_symbol(value.node.expr)


def is_known(expression: Any, known: Iterable[Any]) -> bool:
    """Return whether an expression follows from others."""
    # No numbers in their place: a divisor that is a difference could become 0.
    symbols = {e: sympy.Dummy(integer=True, positive=True) for e in known}
    return expression.xreplace(symbols).free_symbols <= set(symbols.values())


def _is_symbol(expression: Any) -> bool:
    return bool(expression.is_symbol)


def _name(index: int) -> sympy.Symbol:
    return sympy.Symbol(f"d{index}", integer=True)


def _dynamic(places: Sequence[_Place]) -> Dynamic:
    node = places[0][0].node
    found = node.shape_env.bound_sympy(node.expr)
    # Without a bound the range ends at the largest integer; the length of a jagged dim, which
    # stands for many, has none.
    high = low = None
    if found is not None:
        high = int(found.upper) if found.upper.is_Integer and found.upper < 2**31 else None
        low = int(found.lower) if found.lower.is_Integer else None
    low = low or 0
    number = next((i for _, i, d in places if d is None), None)
    dims = tuple((i, d) for _, i, d in places if d is not None)
    # With `dynamic=True` any size may vary, most of them never do; what does is seen at the second.
    varies = bool(dims) and (high is not None or config.assume_static_by_default)
    return Dynamic(node.expr, (id(node.shape_env), str(node.expr)), low, high, varies, number, dims)


class Sizes:
    """Values of a graph's symbols, and of what follows from them.

    Args:
        values: By symbol: integers, or JAX's symbolic dims where a graph is traced once for all
            sizes.
    """

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self._dims = {s: n for s, n in values.items() if is_symbolic_dim(n)}
        self._values = {s: sympy.Integer(n) for s, n in values.items() if s not in self._dims}
        self._found: dict[Any, Any] = {}

    @property
    def are_symbolic(self) -> bool:
        """True if some are JAX's symbolic dims."""
        return bool(self._dims)

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
            self._found[expression, kind] = self._evaluated(expression.xreplace(self._values), kind)
        return self._found[expression, kind]

    def _evaluated(self, expression: Any, kind: type) -> Any:
        symbols = list(expression.free_symbols & self._dims.keys())
        if not symbols:
            return kind(expression)
        function = sympy.lambdify(symbols, expression, modules=[_DIM_FUNCTIONS])
        return function(*(self._dims[s] for s in symbols))

    def integer(self, expression: Any) -> int:
        """An integer expression, where all symbols have integers."""
        return int(expression.xreplace(self._values))

    def all(self, numbers: Iterable[Any]) -> tuple[Any, ...]:
        """As `value`, of several."""
        return tuple(map(self.value, numbers))

    def knows(self, number: Any) -> bool:
        """Return whether `value` can tell a number; what comes from a tensor's contents it
        cannot.
        """
        known = {*self._values, *self._dims}
        return not isinstance(number, SYMBOLIC) or is_known(number.node.expr, known)

    def of(self, number: Any) -> dict[str, int]:
        """The symbols of a number by name, and their values."""
        found = sorted(number.node.expr.free_symbols, key=str)
        return {str(s): int(self._values[s]) for s in found if s in self._values}

    def satisfy(self, guard: Any) -> bool:
        """Return whether a condition on the symbols is met."""
        return bool(guard.xreplace(self._values))

    def inside(self, inputs: Sequence[Any], arguments: Sequence[Any]) -> Sizes:
        """The sizes as the body of a loop or branch knows them, with symbols of its own.

        Args:
            inputs: Metadata of the body's inputs.
            arguments: Arguments of the call.
        """
        own: dict[Any, Any] = {}
        for value, given in zip(inputs, arguments, strict=True):
            pairs: list[tuple[Any, Any]] = []
            if isinstance(value, torch.Tensor):
                pairs = list(zip(value.shape, given.shape))
            elif isinstance(given, int) or is_symbolic_dim(given):
                pairs = [(value, given)]
            own.update((size.node.expr, n) for size, n in pairs if is_symbol(size))
        return Sizes({**self._values, **self._dims, **own})
