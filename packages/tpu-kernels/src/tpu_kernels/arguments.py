"""Arguments and results of a schema, and the flat list of their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

TENSORS = ("Tensor", "Tensor?", "Tensor[]", "Tensor?[]")


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of the schema; ``default`` is its text, "" without one."""

    name: str
    type: str
    default: str = ""


def flatten(arguments: Sequence[Argument], values: Sequence[Any]) -> list[Any]:
    """The values of the tensor arguments, lists flattened, absent ones as None."""
    flat: list[Any] = []
    for argument, value in zip(arguments, values):
        if argument.type in TENSORS:
            flat.extend(value if argument.type.endswith("[]") else [value])
    return flat


def unflatten(
    arguments: Sequence[Argument], values: Sequence[Any], flat: Iterable[Any]
) -> list[Any]:
    """The values with others in place of the tensors that `flatten` gives."""
    stream = iter(flat)

    def replaced(argument: Argument, value: Any) -> Any:
        if argument.type not in TENSORS:
            return value
        return [next(stream) for _ in value] if argument.type.endswith("[]") else next(stream)

    return [replaced(a, v) for a, v in zip(arguments, values)]


def flat_results(
    returns: Sequence[str], results: Sequence[Any], lengths: list[int] | None = None
) -> list[Any]:
    """The results, lists flattened.

    Args:
        returns: ``"Tensor"`` or ``"Tensor[]"`` for each result.
        results: One value, or list of values, a return.
        lengths: Those of the lists are appended to it.
    """
    flat: list[Any] = []
    for kind, value in zip(returns, results):
        items = list(value) if kind == "Tensor[]" else [value]
        if kind == "Tensor[]" and lengths is not None:
            lengths.append(len(items))
        flat.extend(items)
    return flat
