"""The sizes of operands from which the size of a result may follow."""

from __future__ import annotations

from collections.abc import Mapping

from tpu_core.compiler.segment import Node, Segment
from tpu_core.lowering.views import GENERAL, SLICE, Access
from tpu_core.padding.recording import shapes_of_slots


def origins_of_results(segment: Segment) -> dict[int, frozenset[int]]:
    """For the size of each dim of a result those that may differ from it by an offset.

    A window that moves over an image leaves in each dim somewhat fewer positions than that dim has.
    An op with sizes among its arguments may make any of them: its results are left out, as are
    those of ops without operands.

    Returns:
        Positions among the integers of `describe`, by position.
    """
    places = shapes_of_slots(segment, range(sum(len(s.shape) for s in segment.slots)))
    found: dict[int, frozenset[int]] = {}
    for node in segment.nodes:
        if node.plan is None or node.plan.sizes or not node.operands:
            continue
        origins = _by_dim(node, dict(enumerate(places)))
        for slot in node.outputs:
            if slot is None or segment.slots[slot].is_input:
                continue
            rank = len(places[slot])
            for d, place in enumerate(places[slot]):
                found[place] = frozenset(
                    p
                    for p, dims in origins.items()
                    if dims is None or d in dims or d - rank in dims
                )
    return found


def _by_dim(node: Node, places: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, int] | None]:
    """For the sizes of a node's operands their dim in what it reads, from the front and from the
    end; None for any.
    """
    assert node.plan is not None
    found: dict[int, tuple[int, int] | None] = {}
    for slot, read in zip(node.operands, node.plan.reads):
        for place, d in zip(places[slot], _dims(read)):
            if d is None or place in found:
                found[place] = None
            elif d >= 0:
                found[place] = d, d - len(read.sizes)
    return found


def _dims(read: Access) -> list[int | None]:
    """The dim that each base dim is read as; None where that is not known."""
    if read.form == GENERAL:
        return [None] * len(read.base_sizes)
    return list(read.dims) if read.form == SLICE else list(range(len(read.base_sizes)))
