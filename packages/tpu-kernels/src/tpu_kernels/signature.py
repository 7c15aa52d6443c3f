"""PyTorch schema of a JAX function's parameters and results."""

from __future__ import annotations

import collections.abc
import contextlib
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

import jax
import numpy as np

from tpu_core.extend import Lowering

Kind = Literal["array", "optional", "tree", "static", "object"]

_STATIC_TYPES = {int: "int", float: "float", bool: "bool", str: "str"}
_SCALARS = (bool, int, float, complex, np.generic)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the user's function.

    Attributes:
        name: Its name.
        kind: One array, one array or None, a pytree of arrays, a number or text, or any other
            Python value.
        type: In the schema; a pytree is a list of tensors, other values travel in one text.
        default: Of the function; `inspect.Parameter.empty` without.
        how: Positional, keyword, or ``*args``.
    """

    name: str
    kind: Kind
    type: str
    default: Any
    how: Any


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters and results.

    Attributes:
        parameters: In the function's order.
        returns: Number of arrays, 1 for a single one; None for a pytree.
        is_tuple: Whether arrays are returned in a tuple.
    """

    parameters: tuple[Parameter, ...]
    returns: int | None
    is_tuple: bool


def signature_of(name: str, fn: Callable[..., Any], static: Sequence[str]) -> Signature:
    """Read a function's signature.

    Args:
        name: Of the op, for messages.
        fn: The function.
        static: Names of parameters that are Python values, whatever their annotation.

    Raises:
        TypeError: A name in ``static`` is no parameter, a parameter has a name that is not for
            lowerings, or the function takes ``**kwargs``.
    """
    try:
        found = inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name}: the signature of {fn!r} is not known to Python. Wrap it in a function with "
            "named parameters: lambda x: f(x)."
        ) from error
    hints = _hints(fn)
    unknown = set(static) - found.parameters.keys()
    if unknown:
        raise TypeError(
            f"{name}: static names {sorted(unknown)}, but the function has the parameters "
            f"{list(found.parameters)}."
        )
    parameters = []
    for p in found.parameters.values():
        if p.kind is p.VAR_KEYWORD:
            raise TypeError(
                f"{name}: **{p.name} has no counterpart in a schema. Name the arguments."
            )
        if p.name in Lowering.DROPPED_ARGUMENTS:
            raise TypeError(
                f"{name}: '{p.name}' is an argument that PyTorch keeps for itself in schemas. Give "
                "the parameter another name."
            )
        missing = Any if p.kind is p.VAR_POSITIONAL else p.empty
        parameters.append(_parameter(p, hints.get(p.name, missing), p.name in static))
    returns, is_tuple = _returns(hints.get("return", inspect.Signature.empty))
    return Signature(tuple(parameters), returns, is_tuple)


def parameter_names(fn: Callable[..., Any]) -> list[str]:
    """Names of a function's parameters, in order."""
    return list(inspect.signature(fn).parameters)


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    """Annotations by name, those that are texts evaluated where the function was defined."""
    target = inspect.unwrap(fn)
    if not inspect.isroutine(target) and not isinstance(target, type):
        target = type(target).__call__
    names = dict(getattr(target, "__globals__", {}))
    with contextlib.suppress(TypeError, ValueError):  # a callable that is no Python function
        names.update(inspect.getclosurevars(target).nonlocals)
    return {k: _hint(v, names) for k, v in getattr(target, "__annotations__", {}).items()}


def _hint(annotation: Any, names: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, names)
    except Exception:  # evaluating the user's text may raise anything
        # A name for type checkers alone: a pytree takes whatever it is.
        return jax.Array if annotation in ("Array", "ArrayLike", "jax.Array") else Any


def _parameter(p: inspect.Parameter, hint: Any, is_static: bool) -> Parameter:
    kind: Kind
    kind, text = _static(hint) if is_static or not _is_data(hint) else ("tree", "Tensor[]")
    if p.kind is not p.VAR_POSITIONAL and not is_static:
        if _is_array(hint) or hint is p.empty:
            kind, text = "array", "Tensor"
            if p.default is None:
                kind, text = "optional", "Tensor?"
        elif _is_optional_array(hint):
            kind, text = "optional", "Tensor?"
    return Parameter(p.name, kind, text, p.default, p.kind)


def _static(hint: Any) -> tuple[Kind, str]:
    text = _STATIC_TYPES.get(hint)
    return ("static", text) if text else ("object", "")


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_one_array(hint: Any) -> bool:
    if typing.get_origin(hint) is Annotated:
        hint = hint.__origin__
    if hint is jax.Array or hint is np.ndarray:
        return True
    # jaxtyping's Float[Array, "b d"] and the like.
    return getattr(hint, "array_type", None) is jax.Array


def _is_array(hint: Any) -> bool:
    """An array, or a union such as ``ArrayLike`` of arrays and the numbers that become one."""
    members = _members(hint)
    return any(map(_is_one_array, members)) and all(
        _is_one_array(m) or (isinstance(m, type) and issubclass(m, _SCALARS)) or "Array" in str(m)
        for m in members
    )


def _is_optional_array(hint: Any) -> bool:
    members = _members(hint)
    return type(None) in members and _is_array(
        Union[tuple(m for m in members if m is not type(None))]  # noqa: UP007
    )


def _is_data(hint: Any) -> bool:
    """Return whether values of the annotation hold arrays."""
    if hint is Any or hint is inspect.Parameter.empty or _is_array(hint):
        return True
    if hint in (dict, list, tuple):
        return True
    arguments, origin = typing.get_args(hint), typing.get_origin(hint)
    if arguments and origin not in (Literal, type, Callable, collections.abc.Callable):
        return any(a is not Ellipsis and _is_data(a) for a in arguments)
    # A class of arrays: a NamedTuple, or a dataclass that is registered as a pytree.
    fields = getattr(hint, "__annotations__", {}) if isinstance(hint, type) else {}
    return hint not in _STATIC_TYPES and any("Array" in str(t) for t in fields.values())


def _returns(hint: Any) -> tuple[int | None, bool]:
    if hint is inspect.Signature.empty or _is_array(hint):
        return 1, False
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and arguments and all(map(_is_array, arguments)):
        return len(arguments), True
    return None, False
