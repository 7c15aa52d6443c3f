"""Segments with collectives: programs that span several processes' devices."""

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


def spanning(segment: Segment) -> Spanning | None:
    """Builder of a segment's program, if a collective is among its ops."""
    if not SPANNING:
        return None
    return next((SPANNING[n.name] for n in segment.nodes if n.name in SPANNING), None)
