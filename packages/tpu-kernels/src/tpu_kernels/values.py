"""Python values and pytree structures as texts in an op's schema, and back."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from typing import Any

import jax
import numpy as np

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_values: dict[str, Any] = {}


def token_of(value: Any) -> str:
    """A text for a hashable value, by which `value_of` finds it.

    It is the same in every process where the value's contents are: programs are found again in
    the cache. Values of one text that are not equal get texts of their own.
    """
    key = exact(value)
    try:
        known = _tokens.get(key)
    except TypeError as error:
        wrong = _unhashable(value)
        raise TypeError(
            f"a static argument must be hashable, and {type(wrong).__name__} is not: {wrong!r}. "
            "Annotate it as a pytree if it holds arrays, or make it a tuple."
        ) from error
    if known is not None:
        return known
    base = token = hashlib.sha256(_contents(value).encode()).hexdigest()[:16]
    count = 1
    while token in _values:
        count += 1
        token = f"{base}#{count}"
    _values[token] = value
    _tokens[key] = token
    return token


def _unhashable(value: Any) -> Any:
    """The innermost value that keeps another one from being hashed."""
    for item in value if isinstance(value, tuple) else ():
        try:
            hash(item)
        except TypeError:
            return _unhashable(item)
    return value


_EXACT = frozenset({bool, int, str, bytes, type(None)})


def exact(value: Any) -> Any:
    """A key of a value, and of what it holds, with types and signs.

    1, 1.0 and True are equal, and so are 0.0 and -0.0; NaN is not equal to itself. A value of any
    other class counts as it says itself, by ``==`` and by its text.
    """
    kind = type(value)
    if kind in _EXACT:
        return kind, value
    if isinstance(value, (float, complex, np.generic)):
        return kind, repr(value)
    if isinstance(value, tuple):
        return kind, tuple(map(exact, value))
    if isinstance(value, frozenset):
        return kind, frozenset(map(exact, value))
    if isinstance(value, enum.Enum):
        return kind, value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (getattr(value, f.name, None) for f in dataclasses.fields(value) if f.compare)
        return kind, value, tuple(map(_exact_or_text, fields))
    if kind.__eq__ is object.__eq__ or callable(value):
        return kind, value
    return kind, value, _ADDRESS.sub("", repr(value))


def _exact_or_text(value: Any) -> Any:
    """As `exact`; a field that the class leaves out of its hash need not be hashable."""
    key = exact(value)
    try:
        hash(key)
    except TypeError:
        return type(value), _ADDRESS.sub("", repr(value))
    return key


_tokens: dict[Any, str] = {}


def value_of(token: str) -> Any:
    """The value that `token_of` gave the text for."""
    return _values[token]


def _contents(value: Any) -> str:
    if isinstance(value, (tuple, frozenset)):
        items = list(map(_contents, value))
        items = sorted(items) if isinstance(value, frozenset) else items
        return f"{type(value).__qualname__}({','.join(items)})"
    if isinstance(value, enum.Enum):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (
            f"{f.name}={_contents(getattr(value, f.name))}" for f in dataclasses.fields(value)
        )
        return f"{type(value).__qualname__}({','.join(fields)})"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    if isinstance(value, (np.dtype, jax.tree_util.PyTreeDef)):
        return str(value)
    return f"{type(value).__qualname__}:{_ADDRESS.sub('', repr(value))}"
