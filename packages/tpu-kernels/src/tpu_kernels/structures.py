"""Calls with pytrees: where a schema's values are in them is found once for each structure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from tpu_kernels.binding import Binding

_flatten = jax.tree_util.tree_flatten


class StructuredCall:
    """An op's call with the function's own arguments, pytrees and static values among them.

    Args:
        binding: Between the function and the op's schema.
        op: Called with the schema's values.
    """

    def __init__(self, binding: Binding, op: Callable[..., Any]) -> None:
        self._binding, self._op = binding, op
        self._layouts: dict[Any, Layout | None] = {}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op; the result is shaped like the function's."""
        leaves, tree = _flatten((args, kwargs))
        layout = self._layouts.get(tree)
        if layout is not None:
            try:
                known = layout.known.get(layout.static(leaves))
            except TypeError:  # a static value that is not hashable, of which binding complains
                known = None
            if known is not None:
                rest, structured = known
                return structured(self._op(*layout.values(leaves + rest)))
        return self._first(args, kwargs, leaves, tree)

    def _first(self, args: Any, kwargs: Any, leaves: list[Any], tree: Any) -> Any:
        values = self._binding.bind(args, kwargs)
        result = self._binding.structured(values, self._op(*values))
        if tree not in self._layouts:
            self._layouts[tree] = layout_of(self._binding, tree)
        layout = self._layouts[tree]
        if layout is not None:
            rest = [values[i] for i in layout.rest]
            layout.known[layout.static(leaves)] = rest, self._binding.structure(values)
        return result


@dataclass(slots=True)
class Layout:
    """Where a schema's values are among the leaves of arguments of one structure.

    Attributes:
        static: Of the leaves, those that are no tensors, with their types: 1 and True are equal.
        rest: Positions of the values that are not among the leaves, such as defaults.
        values: The schema's values, of a list of the leaves and of the values at ``rest``.
        known: By static leaves, the values at ``rest`` and what shapes the op's results.
    """

    static: Callable[[list[Any]], Any]
    rest: list[int]
    values: Callable[[list[Any]], Sequence[Any]]
    known: dict[Any, tuple[list[Any], Callable[[Any], Any]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Leaf:
    position: int


def layout_of(binding: Binding, tree: Any) -> Layout | None:
    """The layout of ``(args, kwargs)``; None where they do not fit the function's parameters."""
    args, kwargs = jax.tree_util.tree_unflatten(tree, map(_Leaf, range(tree.num_leaves)))
    given = binding.named(args, kwargs)
    where: list[int | slice | None] = []
    static: list[int] = []
    for p in binding.parameters:
        value = given[p.name]
        places = [x.position for x in jax.tree_util.tree_leaves(value) if isinstance(x, _Leaf)]
        if p.kind in ("object", "static"):
            static += places
        if p.kind == "tree":
            where.append(slice(places[0], places[-1] + 1) if places else None)
        elif p.kind != "object":
            if places and not isinstance(value, _Leaf):
                return None
            where.append(places[0] if places else None)
    where += [None] * (
        len(binding.arguments) - len(where)
    )  # what objects and structures are told by
    rest = [i for i, w in enumerate(where) if w is None]
    for k, i in enumerate(rest):
        where[i] = tree.num_leaves + k
    return Layout(_picked_with_types(static), rest, _picked(where))


def _picked(where: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """As `operator.itemgetter`, which gives a single item without a tuple around it."""
    if len(where) == 1:
        (only,) = where
        return lambda leaves: (leaves[only],)
    return operator.itemgetter(*where)


def _picked_with_types(where: Sequence[int]) -> Callable[[list[Any]], Any]:
    if not where:
        return lambda leaves: None
    pick = _picked(where)

    def picked(leaves: list[Any]) -> Any:
        found = pick(leaves)
        return (*found, *map(type, found))

    return picked
