"""Segments that have collectives in them: the devices of several processes run them together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tpu_core.compiler.programs import Program
    from tpu_core.compiler.segment import Segment


class Spanning(Protocol):
    """Makes programs of such segments."""

    def __call__(self, segment: Segment) -> Program | None:
        """A program; its ``handlers`` are None.

        Returns:
            None where the segment is to run in pieces, each op by itself. A program that gives None
            has this called again.
        """


# By name of the overload that is a collective.
SPANNING: dict[str, Spanning] = {}


def spanning(segment: Segment) -> Spanning | None:
    """What makes the program of a segment, if a collective is among its ops."""
    if not SPANNING:
        return None
    return next((SPANNING[n.name] for n in segment.nodes if n.name in SPANNING), None)
