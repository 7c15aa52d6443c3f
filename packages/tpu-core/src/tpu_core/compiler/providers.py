"""Program providers: the policies that a mode brings, each asked in turn for a segment's program.

`ProgramBuilder` asks them in the order of `Mode.providers`, after those of segments that no policy
is about (collectives, parts for CPU kernels) and before the one that compiles a segment as it was
recorded. A provider owns the state of its policy, and a client has one of each, whichever modes
name it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_core.compiler.context import BuildContext
    from tpu_core.compiler.programs import Program
    from tpu_core.compiler.reasons import Reason
    from tpu_core.compiler.segment import Segment

Part = tuple[int, int, bool]
"""First node, the node after the last, and whether CPU kernels run them."""


@dataclass(slots=True)
class ProgramRequest:
    """A request for the program of a segment that has none in memory.

    Attributes:
        segment: The segment. A provider may set it to one with other numbers compiled in, for those
            that are asked next.
        exported: The same, as the extension exported it.
        arrays: Its inputs.
        missing: Gives the ops that no program in memory runs by itself, as (key of that program,
            node); None where the segment may not run op by op. It serves during the request.
        may_be_divided: Whether it may run in parts.
        is_piece: Whether it is one op of a segment that runs op by op.
        may_wait: Whether its program may be made later, in the background. A provider may say no to
            those that are asked next.
        providers: Those that are asked.

    Example:
        >>> len(request.segment.nodes), request.missing is not None
    """

    segment: Segment
    exported: dict[str, Any]
    arrays: list[Any]
    missing: Callable[[], list[tuple[str, int]]] | None = None
    may_be_divided: bool = False
    is_piece: bool = False
    may_wait: bool = True
    providers: Sequence[ProgramProvider] = field(default=(), repr=False)


class ProgramProvider:
    """One way to a program, and the state that it depends on.

    A subclass has ``provide(request)``. It may also have ``note_exact(segment, program)``,
    ``comment(segment, reason)``, ``serves(piece)``, ``due(segment_key)`` and ``close()``, which do
    nothing here.

    Attributes:
        serves_pieces: Whether it is asked for the programs of single ops, too, where a segment runs
            op by op.
        is_verified: Whether runs of its programs are judged as ``TPU_VERIFY`` says.

    Example:
        >>> class OpByOp(ProgramProvider):
        ...     def provide(self, request):
        ...         return [] if request.missing is not None and not request.missing() else None
        >>> Mode("op_by_op", max_ops=None, providers=(lambda context: OpByOp(),))
    """

    is_verified = True
    serves_pieces = False

    def provide(self, request: ProgramRequest) -> Program | list[Part] | None:
        """A program, or the parts that the segment runs in: none of them for op by op.

        Returns:
            None where the next provider is to be asked.
        """
        raise NotImplementedError

    def serves(self, piece: Segment) -> bool:
        """Return whether one op has a program, in memory or in the cache, beside its own."""
        return False

    def due(self, segment_key: str) -> bool:
        """Return whether to be asked again about a segment that runs op by op."""
        return True

    def comment(self, segment: Segment, reason: Reason) -> Reason:
        """The reason to compile a segment as it was recorded, in the words of this policy."""
        return reason

    def note_exact(self, segment: Segment, program: Program) -> None:
        """Take note of a segment that runs as it was recorded."""

    def close(self) -> None:
        """End what runs in the background."""


ProviderFactory = Callable[["BuildContext"], ProgramProvider]
"""Makes a provider for a client; the same function makes one only once."""
