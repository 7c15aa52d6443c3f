"""Integers that a graph is given: sizes, numbers that it computes with, and those it does not need.

Each value of a size is a bucket or a program. An integer that no shape follows from, such as a
position or a divisor, is a number of the call instead, as those of eager's ops are.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten

from tpu_compile import numbers
from tpu_compile.fx_utils import subgraphs
from tpu_compile.sizes import SYMBOLIC, Symbols, is_known

_MOST_FACTOR = 1 << 16
_WORD = 32  # bits of the numbers that stand for those of a call


def split_inputs(
    module: GraphModule, inputs: Sequence[Node], given: Sequence[torch.Tensor]
) -> tuple[list[int], list[int]]:
    """Positions of the inputs that are sizes, and of those that are numbers.

    An integer that no node uses is neither where all shapes follow from the others: a backward
    graph takes sizes of its forward that its tensors do not have, such as ``n`` where they have
    ``n + m``. What a graph returns of its integers the host knows. A truth that forward made of
    sizes, such as ``n > 6``, is a number.

    Args:
        module: The graph.
        inputs: Its placeholders.
        given: Its tensor inputs, as fake tensors.
    """
    values: list[Any] = [n.meta.get("val") for n in inputs]
    integers = [i for i, v in enumerate(values) if isinstance(v, (int, torch.SymInt))]

    def known(positions: Iterable[int]) -> AbstractSet[Any]:
        return Symbols([values[i] for i in positions], given).known

    truths = [i for i, v in enumerate(values) if isinstance(v, torch.SymBool)]
    all_known = known(integers)
    found = [i for i in integers if _may_be_number(inputs[i])]
    while found:
        rest = known(i for i in integers if i not in found)
        fixed = _needed(module, all_known, rest)
        stay = [i for i in found if not is_known(values[i].node.expr, rest)]
        stay = [i for i in stay if not numbers.symbols(values[i]) & fixed]
        if stay == found:
            break
        found = stay
    sizes = [i for i in integers if i not in found]
    used = [i for i in sizes if _is_used(inputs[i])]
    if len(used) < len(sizes):
        unused = {inputs[i] for i in sizes if i not in used}
        has, needs = known(sizes), known(used)
        if all(is_known(e, needs) for e in _expressions(module, unused) if is_known(e, has)):
            sizes = used
    return sizes, [*found, *truths]


def as_words(values: Sequence[int]) -> Iterator[int]:
    """Two words of 32 bits for each number, which is one of 64."""
    for value in values:
        yield from (value & (1 << _WORD) - 1, value >> _WORD & (1 << _WORD) - 1)


def from_words(words: Sequence[int]) -> list[int]:
    """The numbers of such words; what stands above a word's 32 bits does not count."""
    mask = (1 << _WORD) - 1
    whole = [(high & mask) << _WORD | low & mask for low, high in _pairs(words)]
    return [n - (n >> 2 * _WORD - 1 << 2 * _WORD) for n in whole]


def traced(words: Sequence[Any], inputs: Sequence[Node]) -> list[jax.Array]:
    """As `from_words`, of numbers that a program is given: int64 or truths, of no dims.

    Args:
        words: Two a number.
        inputs: The placeholders of the numbers.
    """
    halves = [jnp.asarray(w).astype(jnp.uint32).astype(jnp.int64) for w in words]
    found = [high << _WORD | low for low, high in _pairs(halves)]
    are_truths = (isinstance(n.meta["val"], torch.SymBool) for n in inputs)
    return [n.astype(bool) if is_truth else n for n, is_truth in zip(found, are_truths)]


def _pairs(words: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(words[::2], words[1::2], strict=True)


def _may_be_number(node: Node) -> bool:
    """Return whether an input is an integer that a node uses, from 0 on: a negative index would be
    counted from the end of an array, which may be padded.
    """
    return _is_used(node) and numbers.is_from_zero(node)


def _is_used(node: Node) -> bool:
    return any(user.op != "output" for user in node.users)


def _needed(module: GraphModule, all_known: AbstractSet[Any], known: AbstractSet[Any]) -> set[Any]:
    """Symbols of which a node needs a value as it is traced.

    Args:
        module: The graph.
        all_known: Expressions that all inputs give.
        known: Those that are left.
    """
    found: set[Any] = set()
    for node in module.graph.nodes:
        for value in tree_flatten(node.meta.get("val"))[0]:
            if numbers.are_known(value, known) or not numbers.are_known(value, all_known):
                continue  # the latter is computed already
            is_number = numbers.is_from_zero(node) and numbers.can_be_computed(node)
            # A loop or branch may have it as a size, by a name of its own.
            is_number = is_number and not any(map(_is_higher_order, node.users))
            is_number = is_number and not _may_overflow(node)
            is_given = node.op == "placeholder" and isinstance(value, torch.SymBool)
            if not is_number and not is_given:
                found |= numbers.symbols(value)
        for inner in subgraphs(node):
            found |= _needed(inner, all_known, known)
    return found


def _may_overflow(node: Node) -> bool:
    """Return whether a product may not fit into 64 bits, which raises in PyTorch: one of two
    numbers, or of one and a large constant.
    """
    factors = [f for f in node.args if isinstance(f, int) and abs(f) < _MOST_FACTOR]
    return node.target is operator.mul and not factors


def _is_higher_order(node: Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _expressions(module: GraphModule, without: Collection[Node] = ()) -> set[Any]:
    """The numbers of a graph's nodes and of the shapes and strides of their tensors, those of its
    subgraphs among them.
    """
    found: set[Any] = set()
    for node in module.graph.nodes:
        if node not in without:
            for value in tree_flatten(node.meta.get("val"))[0]:
                is_tensor = isinstance(value, torch.Tensor)
                own = (*value.shape, *value.stride()) if is_tensor else (value,)
                found.update(n.node.expr for n in own if isinstance(n, SYMBOLIC))
            found.update(*map(_expressions, subgraphs(node)))
    return found
