"""Symbolic dims of JAX, whose comparisons are noted.

JAX raises where it cannot order two expressions for all sizes; here a sample of sizes decides. It
takes two that it cannot prove equal for different. The trace is that of each size for which all
comparisons turn out as they did.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
from jax import export
from jax._src.core import ShapedArray
from jax._src.export import shape_poly

_Expression = shape_poly._DimExpr
_equals = _Expression.__eq__
_at_least = shape_poly._geq_decision

_INTEGERS = (int, np.integer)
# Its cache of shapes compares one that is looked up with whatever lies near it in a hash table, and
# holds another under another size.
_INTERNING = ShapedArray.__new__.__code__

# By expression and kind of comparison, whether it holds: == 0 or >= 0.
_Found = dict[tuple[Any, str], bool]


class Conditions:
    """Comparisons with zero that a trace made.

    Example:
        >>> (n,) = dims(1)
        >>> with comparing([n], [5]) as conditions:
        ...     n < 8, n == 7  # in a trace
        (True, False)
        >>> list(conditions)
        [(n0 - 8, '>=', False), (n0 - 7, '==', False)]
    """

    def __init__(self, dims: Sequence[Any], sample: Sequence[int]) -> None:
        self._scope = dims[0].scope if dims else None
        self._sample = sample
        self._found: _Found = {}

    def __iter__(self) -> Iterator[tuple[Any, str, bool]]:
        """Each expression, with ``"=="`` or ``">="``, and whether that holds of it and zero."""
        return ((expression, kind, holds) for (expression, kind), holds in self._found.items())

    def always_hold(self, values: Sequence[Sequence[int]] | None) -> bool:
        """Return whether all turn out the same within the bounds of the dims.

        Args:
            values: All values of the dims, for what does not follow from their bounds; None where
                they are too many.
        """
        rest = [c for c in self if not self._is_bounded(*c[:2])]
        return not rest or (
            values is not None
            and all(
                compared(value(expression, row), kind) == holds
                for expression, kind, holds in rest
                for row in values
            )
        )

    @staticmethod
    def _is_bounded(expression: Any, kind: str) -> bool:
        """Return whether an expression that was taken for unequal to zero is so by its bounds."""
        try:
            return kind == "==" and (expression >= 1 or expression <= -1)
        except shape_poly.InconclusiveDimensionOperation:
            return False

    def concern(self, *compared: Any) -> bool:
        """Return whether all that is compared is a number or an expression of the dims."""
        return all(
            c.scope is self._scope if isinstance(c, _Expression) else isinstance(c, _INTEGERS)
            for c in compared
        )

    def differ(self, a: Any, b: Any) -> None:
        """Take note that two expressions were taken for different."""
        if isinstance(difference := a - b, _Expression):
            self._found[difference, "=="] = False

    def at_least(self, a: Any, b: Any) -> bool:
        """Return whether ``a >= b`` in the sample, which is a condition from now on."""
        difference = a - b
        holds = value(difference, self._sample) >= 0
        self._found[difference, ">="] = holds
        return holds


def compared(number: int, kind: str) -> bool:
    """Return whether a number is 0 (``"=="``), or at least 0 (``">="``)."""
    return number == 0 if kind == "==" else number >= 0


# While any thread traces, JAX's comparisons are replaced.
_lock = threading.Lock()
_traces = 0
_conditions: ContextVar[Conditions | None] = ContextVar("tpu_dim_conditions", default=None)


def dims(count: int, smallest: int = 2, bounds: Sequence[int] = ()) -> Sequence[Any]:
    """Symbolic dims of a scope of their own, of ``smallest`` and more.

    Args:
        count: Number of dims.
        smallest: The least value of each.
        bounds: The largest value of each, where there is one.

    Example:
        >>> n, m = dims(2)
        >>> n * m >= 4
        True
    """
    names = [f"n{i}" for i in range(count)]
    ranges = [f"{n} >= {smallest}" for n in names]
    ranges += [f"{n} <= {max(bound, smallest)}" for n, bound in zip(names, bounds)]
    return export.symbolic_shape(",".join(names), constraints=ranges)


@contextlib.contextmanager
def comparing(dims: Sequence[Any], sample: Sequence[int]) -> Iterator[Conditions]:
    """Note comparisons of dims, and decide by a sample of their values which is larger.

    What a set or a dictionary is asked for is not seen.
    """
    global _traces
    conditions = Conditions(dims, sample)
    # JAX has no hook for comparisons, so its own functions are replaced. To mypy a method, and a
    # function of its signature, may not be assigned to.
    with _lock:
        _traces += 1
        _Expression.__eq__ = _noted_equals  # type: ignore[method-assign]
        shape_poly._geq_decision = _noted_at_least  # type: ignore[assignment]
    token = _conditions.set(conditions)
    try:
        yield conditions
    finally:
        _conditions.reset(token)
        with _lock:
            _traces -= 1
            if not _traces:
                _Expression.__eq__ = _equals  # type: ignore[method-assign]
                shape_poly._geq_decision = _at_least


def _noted_equals(self: Any, other: Any) -> bool:
    conditions = _conditions.get()
    if conditions is None:
        return _equals(self, other)
    token = _conditions.set(None)  # arithmetic compares, too
    try:
        equal = _equals(self, other)
        by_cache = sys._getframe(1).f_code is _INTERNING
        if not equal and not by_cache and conditions.concern(self, other):
            conditions.differ(self, other)
        return equal
    finally:
        _conditions.reset(token)


def _noted_at_least(a: Any, b: Any, text: Callable[[], str]) -> bool:
    conditions = _conditions.get()
    if conditions is None:
        return _at_least(a, b, text)
    token = _conditions.set(None)
    try:
        return _at_least(a, b, text)
    except shape_poly.InconclusiveDimensionOperation:
        if not conditions.concern(a, b):
            raise
        return conditions.at_least(a, b)
    finally:
        _conditions.reset(token)


def value(expression: Any, values: Sequence[int]) -> int:
    """The value of an expression where the dims have these values.

    Example:
        >>> n, m = dims(2)
        >>> value(n * m // 2, [3, 5])
        7
    """
    if not isinstance(expression, _Expression):
        return int(expression)
    return sum(
        coefficient * math.prod(_factor(f, values) ** power for f, power in term._factors)
        for term, coefficient in expression._sorted_terms
    )


def _factor(factor: Any, values: Sequence[int]) -> int:
    if factor.var is not None:
        return values[int(factor.var[1:])]
    a, b = (value(operand, values) for operand in factor.operands)
    if factor.operation == factor.FLOORDIV:
        return a // b
    if factor.operation == factor.MOD:
        return a % b
    return max(a, b) if factor.operation == factor.MAX else min(a, b)
