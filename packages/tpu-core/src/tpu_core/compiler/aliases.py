"""Input-output aliases: outputs that take a donated input's memory."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tpu_core.compiler.segment import Segment


_UPDATES: dict[str, Callable[[str], Mapping[int, int]]] = {}


def tells_updates(op: str, find: Callable[[str], Mapping[int, int]]) -> None:
    """Declare an op that stands for graphs whose results are written to inputs once it has run.

    Args:
        op: It takes ``(inputs, ..., key)`` and returns ``Tensor[]``.
        find: For the op's ``key``, positions of such results with those of the inputs.
    """
    _UPDATES[op] = find


def aliases(
    segment: Segment, shape: Callable[[int], tuple[int, ...]] | None = None
) -> dict[int, int]:
    """For positions of donated inputs, the output that is to have their memory.

    What was written in place stays where it is: a weight's memory for its gradient would cost a
    copy of the weight, which the optimizer still reads. The other inputs lend theirs to any output
    of their shape and dtype.

    Args:
        segment: The segment.
        shape: Shape of a slot's array, where it is not that of its value.
    """

    def kind_of(slot: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
        value = segment.slots[slot]
        return (shape(slot) if shape else value.shape), value.dtype

    position = {slot: i for i, slot in enumerate(segment.inputs())}
    free = set(segment.donated)
    found = {}
    earlier = first_values(segment)
    for i, slot in enumerate(segment.live):
        before = earlier.get(slot)
        if before in free and kind_of(before) == kind_of(slot):
            free.remove(before)
            found[position[before]] = i
    lenders: dict[Any, deque[int]] = defaultdict(deque)
    for slot in segment.donated:
        if slot in free:
            lenders[kind_of(slot)].append(position[slot])
    taken = set(found.values())
    for i, slot in enumerate(segment.live):
        if i not in taken and (waiting := lenders[kind_of(slot)]):
            found[waiting.popleft()] = i
    return found


def first_values(segment: Segment) -> dict[int, int]:
    """For each slot whose value was written to a storage, what that held at first."""
    first: dict[int, int] = {}
    for node in segment.nodes:
        if node.plan is None:
            continue
        if find := _UPDATES.get(node.plan.op):
            for result, operand in find(node.plan.argument("key")).items():
                slot, old = node.outputs[result], node.operands[operand]
                if slot is not None:
                    first[slot] = first.get(old, old)
        if not node.plan.writes:
            continue
        written = node.outputs[len(node.outputs) - len(node.plan.writes) :]
        for slot, before in zip(written, node.plan.overwritten(node.operands)):
            if slot is not None and before is not None:
                first[slot] = first.get(before, before)
    return first
