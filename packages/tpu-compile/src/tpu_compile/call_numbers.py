"""Numbers of a call: the host computes them, and passes them to the graph's program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from tpu_compile.rng import as_scalars
from tpu_compile.sizes import Sizes

_WORD = 32  # bits of the numbers that stand for an integer of a call


class CallNumbers:
    """The numbers that a graph's program is given.

    Args:
        inputs: The placeholders of the graph.
        nodes: Those that are such numbers, and what Python computes of them.
        others: Numbers that are computed on the way, of which the program has no value.
    """

    def __init__(
        self, inputs: Sequence[Node], nodes: Sequence[Node] = (), others: Sequence[Node] = ()
    ) -> None:
        self.nodes, self.others = list(nodes), list(others)
        self._positions = {node: i for i, node in enumerate(inputs)}
        self._steps = list(dict.fromkeys(s for node in nodes for s in self._steps_of(node)))
        self._are_floats = [isinstance(n.meta["val"], torch.SymFloat) for n in nodes]

    def _steps_of(self, node: Node) -> Iterator[Node]:
        if _is_computed(node):
            for n in node.all_input_nodes:
                yield from self._steps_of(n)
        yield node

    def values(self, arguments: Mapping[int, Any], sizes: Sizes) -> list[Any]:
        """The numbers of a call.

        Args:
            arguments: The numbers among the graph's arguments, by position.
            sizes: Values of the graph's symbols.

        Raises:
            OverflowError: An integer has more than 64 bits.
            ZeroDivisionError: As in Python.
        """
        found: dict[Node, Any] = {}
        for node in self._steps:
            if node in self._positions:
                found[node] = arguments[self._positions[node]]
            elif _is_computed(node):
                args: Any = map_arg(node.args, found.__getitem__)
                kwargs: Any = map_arg(node.kwargs, found.__getitem__)
                target: Any = node.target
                found[node] = target(*args, **kwargs)
            else:  # the size of a tensor
                found[node] = sizes.value(node.meta["val"])
        pairs = zip(self.nodes, self._are_floats)
        return [float(found[n]) if is_float else _int64(found[n]) for n, is_float in pairs]

    def as_scalars(self, values: Sequence[Any], words: Sequence[int]) -> list[Any]:
        """``Scalar[]`` of an op: words of random numbers, those of integers, floats, and beside
        floats alone an integer.
        """
        integers = [n for n, is_float in zip(values, self._are_floats) if not is_float]
        floats = [n for n, is_float in zip(values, self._are_floats) if is_float]
        scalars = as_scalars([*words, *_as_words(integers)])
        # A list of one number several times is recorded in another form, which is a program more.
        other = [0] if not scalars and len(floats) > 1 else []
        return [*scalars, *floats, *other]

    def of_scalars(self, scalars: Sequence[Any]) -> dict[Node, Any]:
        """The numbers of such a list, without the words of random numbers; None for others."""
        words = 2 * self._are_floats.count(False)
        return self._of(_from_words(scalars[:words]), scalars[words:])

    def traced(self, scalars: Sequence[Any]) -> dict[Node, Any]:
        """As `of_scalars`, in a program: int64, float64 or truths, of no dims."""
        words = 2 * self._are_floats.count(False)
        halves = [jnp.asarray(w).astype(jnp.uint32).astype(jnp.int64) for w in scalars[:words]]
        integers = [high << _WORD | low for low, high in _pairs(halves)]
        floats = [jnp.asarray(n, jnp.float64) for n in scalars[words:]]
        found = self._of(integers, floats)
        truths = [n for n in self.nodes if isinstance(n.meta["val"], torch.SymBool)]
        return found | {n: found[n].astype(bool) for n in truths}

    def _of(self, integers: Sequence[Any], floats: Sequence[Any]) -> dict[Node, Any]:
        rest, more = iter(integers), iter(floats)
        pairs = zip(self.nodes, self._are_floats)
        found = {node: next(more if is_float else rest) for node, is_float in pairs}
        return dict.fromkeys(self.others) | found


def _is_computed(node: Node) -> bool:
    return node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload)


def _int64(value: Any) -> int:
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise OverflowError(f"{number} is an integer of more than 64 bits, which no tensor holds.")
    return number


def _as_words(values: Sequence[int]) -> Iterator[int]:
    """Two words of 32 bits for each integer, which is one of 64."""
    for value in values:
        yield from (value & (1 << _WORD) - 1, value >> _WORD & (1 << _WORD) - 1)


def _from_words(words: Sequence[int]) -> list[int]:
    """The integers of such words; what stands above a word's 32 bits does not count."""
    mask = (1 << _WORD) - 1
    whole = [(high & mask) << _WORD | low & mask for low, high in _pairs(words)]
    return [n - (n >> 2 * _WORD - 1 << 2 * _WORD) for n in whole]


def _pairs(words: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(words[::2], words[1::2], strict=True)
