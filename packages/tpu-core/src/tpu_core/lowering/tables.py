"""Constant arrays that follow from sizes, such as the positions that an interpolation reads.

They are constants of a program for fixed sizes. On padded arrays they are inputs of it: another
size has other tables, and the same equations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Table = np.ndarray[Any, Any]

_made: ContextVar[list[Table] | None] = ContextVar("tpu_tables_made", default=None)
_given: ContextVar[Iterator[jax.Array] | None] = ContextVar("tpu_tables_given", default=None)


def table(values: Any, dtype: Any) -> jax.Array:
    """A constant array that follows from sizes; called once for each in a lowering.

    Args:
        values: A NumPy array.
        dtype: The dtype of the result.

    Example:
        >>> jnp.take(x, table(np.arange(outputs) * size // outputs, np.int32), axis=0)
    """
    values = np.asarray(values, dtype)
    if (made := _made.get()) is not None:
        made.append(values)
    given = _given.get()
    if given is None:
        return jnp.asarray(values)
    other = next(given, None)
    if other is None:
        raise LookupError("a lowering made more tables than in an earlier trace")
    return other


def are_inputs() -> bool:
    """Return whether tables are inputs, so that a lowering's ops must be those of other sizes.

    A program for fixed sizes takes slices and repeats where a table would hold no more than them.

    Example:
        >>> x.reshape(n, -1).sum(1) if not are_inputs() else pool_by_table(x)
    """
    return _made.get() is not None or _given.get() is not None


@contextlib.contextmanager
def collected() -> Iterator[list[Table]]:
    """The tables that lowerings make, in order."""
    found: list[Table] = []
    token = _made.set(found)
    try:
        yield found
    finally:
        _made.reset(token)


@contextlib.contextmanager
def replaced(arrays: Iterator[jax.Array]) -> Iterator[None]:
    """Others in place of the tables that lowerings make, in the order of `collected`."""
    token = _given.set(arrays)
    try:
        yield
    finally:
        _given.reset(token)
