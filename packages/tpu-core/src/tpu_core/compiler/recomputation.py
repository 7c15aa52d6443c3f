"""Keeps recomputed ops apart from the ones that they repeat.

All that a recomputation reads goes through one optimization barrier together with the gradients
that its backward waits for, as in `jax.checkpoint`: XLA can neither merge the recomputed ops with
the first ones, nor compute them before the gradients are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax import lax

if TYPE_CHECKING:
    from tpu_core.compiler.segment import Node, Segment

_MARKER = "tpu.recompute.default"


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Nodes between two markers.

    Attributes:
        begin, end: Indices of the markers; ``end`` is the number of nodes where the segment was
            cut before it.
        reads: Slots read in between and made before.
        gradients: Slots made before that the backward ops behind it read.
    """

    begin: int
    end: int
    reads: list[int]
    gradients: list[int]


def find(segment: Segment) -> list[Recomputation]:
    """The recomputations of a segment, by their beginning; they may be nested."""
    found, open_ = [], []
    for i, node in enumerate(segment.nodes):
        if not _is_marker(node):
            continue
        if _begins(node):
            open_.append(i)
        elif open_:  # otherwise a cut parted it from its beginning: nothing to be merged with
            found.append((open_.pop(), i))
    found += [(i, len(segment.nodes)) for i in open_]
    return [_between(segment, begin, end) for begin, end in sorted(found)]


def _is_marker(node: Node) -> bool:
    return node.plan is not None and node.plan.op == _MARKER


def _begins(node: Node) -> bool:
    assert node.plan is not None
    return any(name == "begin" and value for name, _, value in node.plan.template)


def _made(nodes: list[Node]) -> set[int]:
    return {slot for node in nodes for slot in node.outputs if slot is not None}


def _read(nodes: list[Node]) -> Iterator[int]:
    return (slot for node in nodes if not _is_marker(node) for slot in node.operands)


def _between(segment: Segment, begin: int, end: int) -> Recomputation:
    nodes = segment.nodes
    before, inside = nodes[:begin], nodes[begin:end]
    inner = _made(inside)
    reads = dict.fromkeys(slot for slot in _read(inside) if slot not in inner)
    # Behind the last op that reads what was recomputed come other ops: an optimizer, say.
    last = max(
        (i for i in range(end, len(nodes)) if not inner.isdisjoint(nodes[i].operands)), default=end
    )
    computed = _made(before)
    gradients = dict.fromkeys(s for s in _read(nodes[end : last + 1]) if s in computed)
    return Recomputation(begin, end, [s for s in reads if s not in gradients], [*gradients])


class Barriers:
    """Puts the barriers of a segment's recomputations while its nodes are lowered in order.

    Args:
        segment: The segment.
    """

    def __init__(self, segment: Segment) -> None:
        self._begins = {r.begin: r for r in find(segment)}
        self._restore: dict[int, dict[int, Any]] = {}

    def before(self, node: int, values: dict[int, Any]) -> None:
        """Change the values that the node at an index, and those behind it, are to read.

        Args:
            node: Index of the node about to be lowered.
            values: The value of each slot so far.
        """
        values.update(self._restore.pop(node, {}))
        r = self._begins.get(node)
        if r is None:
            return
        slots = [*r.reads, *r.gradients]
        if not slots:
            return
        # Others read what came before. The gradients stay behind the barrier: XLA drops from it
        # what nobody reads.
        outer = self._restore.setdefault(r.end, {})
        for slot in r.reads:
            outer.setdefault(slot, values[slot])
        values.update(zip(slots, lax.optimization_barrier([values[s] for s in slots])))
