"""Sizes of operands and results, and how one may follow from another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tpu_core.compiler.segment import Node, Segment
from tpu_core.lowering.views import GENERAL, SLICE, Access
from tpu_core.padding.recording import shapes_of_slots
from tpu_core.recorder.plan import Operand

# Ops whose windows may step over several elements of an image at a time, and their images.
_STEPPING = re.compile(r"aten\.(convolution|(max|avg)_pool)\w*\.")
_IMAGES = {"input", "self", "grad_output"}


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


def stepped_sizes(segment: Segment) -> list[tuple[int, int]]:
    """Pairs of sizes of which one is the other divided and rounded: it is no multiple of that,
    though it seems so where none of a few images is odd.

    Returns:
        Positions among the integers of `describe`.
    """
    places = shapes_of_slots(segment, range(sum(len(s.shape) for s in segment.slots)))
    found: list[tuple[int, int]] = []
    for node in segment.nodes:
        if node.plan is None or not _STEPPING.match(node.plan.compute.op):
            continue
        given = {name: value for name, _, value in node.plan.template}
        steps = _integers(given.get("stride")) or _integers(given.get("kernel_size"))
        if max(steps, default=1) < 2 or given.get("transposed") is True:
            continue
        operands = [v.index for n, v in given.items() if n in _IMAGES and isinstance(v, Operand)]
        slots = [node.operands[i] for i in operands] + [i for i in node.outputs if i is not None]
        rank = len(places[slots[0]])
        images = [places[i] for i in slots if len(places[i]) == rank]
        for d in range(min(rank - 1, len(steps)) if len(steps) > 1 else rank - 2):
            along = [image[-1 - d] for image in images]
            found += [(a, b) for i, a in enumerate(along) for b in along[i + 1 :]]
    return found


def _integers(value: Any) -> list[int]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [n for n in values if isinstance(n, int)]


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
