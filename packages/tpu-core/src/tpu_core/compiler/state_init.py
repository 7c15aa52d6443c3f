"""State initialization in a loop's first iteration, as of an optimizer's moments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpu_core.compiler.aliases import first_values

if TYPE_CHECKING:
    from tpu_core.compiler.segment import Segment


def new_state(segment: Segment) -> list[int]:
    """Nodes that make a constant which the segment updates in place, and whose memory lives on.

    Without them the segment is what the next round records, where the state is there already.

    Returns:
        Indices of the nodes, ascending; none where nothing else would be left.
    """
    first = first_values(segment)
    state = {first[slot] for slot in segment.live if slot in first}
    found = [
        i
        for i, node in enumerate(segment.nodes)
        if not node.operands
        and not (node.plan and node.plan.random)
        and all(slot in state for slot in node.outputs)
    ]
    return found if len(found) < len(segment.nodes) else []


def of_export(exported: dict[str, Any]) -> list[int]:
    """`new_state` of what the extension exports."""
    from tpu_core.compiler.segment import Segment

    return new_state(Segment.from_export(exported))
