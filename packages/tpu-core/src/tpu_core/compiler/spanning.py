"""Segments with collectives: programs that span several processes' devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tpu_core.compiler.providers import Part, ProgramProvider, ProgramRequest

if TYPE_CHECKING:
    from tpu_core.compiler.programs import Program
    from tpu_core.compiler.segment import Segment


class Spanning(Protocol):
    """Makes programs of such segments."""

    def __call__(self, segment: Segment) -> Program | None:
        """A program; its ``handlers`` are None.

        Returns:
            None where the segment is to run op by op. A program that gives None
            has this called again.
        """


# By name of the overload that is a collective.
SPANNING: dict[str, Spanning] = {}


def register_spanning(op: str, make: Spanning) -> None:
    """Declare an op that runs on several processes' devices, and what makes its programs.

    Args:
        op: The overload, ``"tpu_distributed.collective.default"``.
        make: Called with each new segment that has the op.

    Example:
        >>> register_spanning("mylib.exchange.default", lambda segment: None)  # always op by op
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
