"""Evaluate graphs of functional overloads on JAX values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.export import is_symbolic_dim
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tpu_compile.control_flow import LOWERINGS, HigherOrderCall
from tpu_compile.fx_utils import line_label, lowering_of
from tpu_compile.numbers import INDEXED, ITEM, WINDOWS, window
from tpu_compile.random_states import state_of
from tpu_compile.recomputation import Barriers
from tpu_compile.rng import Draws, is_random
from tpu_compile.sizes import Sizes
from tpu_core.extend import GraphEvaluator, copy_to_jax

Label = Callable[[Node], str]


def is_arithmetic(value: Any) -> bool:
    """Return whether a node's metadata is that of a number."""
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


class _Evaluator(GraphEvaluator):
    """Evaluates a compiled graph, see `evaluate`."""

    def __init__(
        self,
        module: GraphModule,
        sizes: Sizes,
        draws: Draws,
        same: Mapping[Node, Node],
        label: Label = line_label,
        is_body: bool = False,
        passed: Mapping[Node, Any] | None = None,
    ) -> None:
        self._is_body, self._passed = is_body, passed or {}
        self._sizes, self._draws, self._same, self._label = sizes, draws, same, label
        self._barriers = Barriers(module)

    def compared(self, module: GraphModule) -> set[Node]:
        # XLA:CPU has no barrier in a small loop.
        return set() if self._is_body else super().compared(module)

    def argument(self, node: Node, value: Any) -> Any:
        # A number that a loop computes: it must not widen what it meets.
        is_number = is_arithmetic(node.meta.get("val"))
        return self.number(value) if is_number and _is_array(value) else value

    def constant(self, value: Any) -> Any:
        return value if isinstance(value, GraphModule) else copy_to_jax(value)

    def call(self, node: Node, values: dict[Node, Any]) -> Any:
        read = self._barriers.values(node, values)
        meta = node.meta.get("val")
        if node in self._same:
            return values[self._same[node]]
        if node in self._passed:
            number = self._passed[node]
            return None if number is None else self.number(number)
        if is_arithmetic(meta) and self._sizes.knows(meta):
            return self._sizes.value(meta)
        if node.target is state_of:
            return None  # is known to the caller alone
        with jax.named_scope(self._label(node)):
            return self.called(node, read)

    def call_op(self, node: Node, values: Mapping[Node, Any]) -> Any:
        op: Any = node.target
        entry = lowering_of(op)
        if (op in INDEXED or op in WINDOWS) and (found := self._window(node, values)) is not None:
            return found
        if entry is not None:
            key = self._draws.key(node) if is_random(node) else None
            given = self._with_numbers(node, values)
            return self.call_lowering(node, entry, given, key, self._sizes.value)
        args: Any = map_arg(node.args, values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, values.__getitem__)
        if op is ITEM:
            return self.number(jnp.reshape(args[0], ()))
        if op in LOWERINGS:
            inner = functools.partial(call, label=self._label)
            own = HigherOrderCall(node, inner, self._sizes, self._draws)
            return LOWERINGS[op](own, *args, **kwargs)
        return op(*args, **kwargs)  # arithmetic on numbers that the program computes

    def _window(self, node: Node, values: Mapping[Node, Any]) -> jax.Array | None:
        """The result of an op whose index or start the program computes; None if it does not.

        The graph's guards say that it lies in the array.
        """
        op: Any = node.target
        args: Any = map_arg(node.args, values.__getitem__)
        if op in INDEXED:
            dim, start = args[INDEXED[op] - 1 : INDEXED[op] + 1]
        else:
            dim, start, _, _ = window(op, args)
        if not _is_array(start):
            return None
        shape = self._sizes.all(node.meta["val"].shape)
        if op is _aten.select.int:
            return lax.dynamic_index_in_dim(args[0], start, dim, keepdims=False)
        if op is _aten.slice.Tensor:
            return lax.dynamic_slice_in_dim(args[0], start, shape[dim], dim)
        if op is _aten.slice_scatter.default:
            return lax.dynamic_update_slice_in_dim(args[0], args[1], start, dim)
        zeros = jnp.zeros(shape, args[0].dtype)
        if op is _aten.slice_backward.default:
            return lax.dynamic_update_slice_in_dim(zeros, args[0], start, dim)
        return lax.dynamic_update_index_in_dim(zeros, args[0], start, dim)

    def _with_numbers(self, node: Node, values: Mapping[Node, Any]) -> Mapping[Node, Any]:
        """The values before a node, with arrays for symbolic dims that it computes with."""
        if not self._sizes.are_symbolic:
            return values
        op: Any = node.target
        kinds = {a.name: str(a.type) for a in op._schema.arguments}
        given = {**dict(zip(kinds, node.args)), **node.kwargs}
        numbers = [a for n, a in given.items() if isinstance(a, Node) and kinds[n] in _NUMBERS]
        dims = {a: values[a] for a in numbers if is_symbolic_dim(values[a])}
        return {**values, **{a: self.number(jnp.asarray(n)) for a, n in dims.items()}}


_aten = torch.ops.aten
# Types of arguments that take a number to compute with, where others take a size.
_NUMBERS = frozenset({"Tensor", "number", "Optional[Tensor]", "Optional[number]"})


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype")


def evaluate(
    module: GraphModule,
    arguments: Iterable[Any],
    sizes: Sizes,
    draws: Draws,
    same: Mapping[Node, Node] | None = None,
    passed: Mapping[Node, Any] | None = None,
) -> Mapping[Node, Any]:
    """The value of each node.

    Args:
        module: A graph that can be lowered.
        arguments: JAX values of its placeholders, and numbers for sizes.
        sizes: Values of the symbols in its metadata.
        draws: Gives the keys of random ops.
        same: Calls that are left out, with those whose results stand in for theirs.
        passed: Numbers that the host has computed, or None for those that no op takes.
    """
    evaluator = _Evaluator(module, sizes, draws, same or {}, passed=passed)
    return evaluator.values(module, arguments)


def call(
    module: GraphModule,
    arguments: Sequence[Any],
    sizes: Sizes,
    draws: Draws,
    label: Label = line_label,
) -> tuple[Any, ...]:
    """Return values of a graph inside of another; arguments as of `evaluate`.

    Args:
        module, arguments, sizes, draws: As of `evaluate`.
        label: Name of a node in XLA's metadata.
    """
    evaluator = _Evaluator(module, sizes, draws, {}, label, is_body=True)
    return tuple(evaluator.results(module, arguments))
