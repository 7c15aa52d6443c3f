"""Segments with collectives: programs that span several processes' devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tpu_core.compiler.providers import Part, ProgramProvider, ProgramRequest

if TYPE_CHECKING:
    from tpu_core.compiler.programs import Program
    from tpu_core.compiler.segment import Segment


Spanning = Callable[["Segment"], "Program | None"]
"""Makes programs of such segments.

A program's ``handlers`` are None. None is for a segment that is to run op by op; where a program
gives None, this is called again.
"""

# By name of the overload that is a collective.
SPANNING: dict[str, Spanning] = {}


def register_spanning(op: str, make: Spanning) -> None:
    """Declare an op that runs on several processes' devices, and what makes its programs.

    Args:
        op: The overload, ``"tpu_distributed.collective.default"``.
        make: Called with each new segment that has the op.
    """
    SPANNING[op] = make


class SpanningPrograms(ProgramProvider):
    """Programs of segments with collectives, by what was registered for those."""

    is_verified = False

    def provide(self, request: ProgramRequest) -> Program | list[Part] | None:
        """The program, if a collective is among the ops."""
        segment = request.segment
        make = next((SPANNING[n.name] for n in segment.nodes if n.name in SPANNING), None)
        return None if make is None else make(segment) or []
