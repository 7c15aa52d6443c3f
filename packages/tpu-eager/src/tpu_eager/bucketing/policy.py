"""Segments that differ from earlier ones: one program for many sizes, and parts beyond a limit."""

from __future__ import annotations

from typing import Any

from tpu_core.config import config
from tpu_core.errors import RecompileLimitWarning
from tpu_core.extend import BuildContext, Program, ProgramProvider, ProgramRequest, Segment
from tpu_eager.bucketing.families import Families
from tpu_eager.bucketing.host_runs import HostRuns
from tpu_eager.bucketing.line_programs import PART
from tpu_eager.bucketing.new_sizes import NewSizes
from tpu_eager.bucketing.recompile_limit import Part, RecompileLimit
from tpu_eager.bucketing.small_reads import SmallReads
from tpu_eager.costs import compile_seconds, host_seconds


class Bucketed(ProgramProvider):
    """Padded programs, one for each bucket of sizes, and the limit on the programs of a line.

    Args:
        context: The client's.

    Attributes:
        limit: Counts the programs of each line.
    """

    serves_pieces = True

    def __init__(self, context: BuildContext) -> None:
        self._context = context
        self.limit = RecompileLimit()
        self._small = SmallReads()
        self._parts = HostRuns()
        self._families = Families(context, lambda s, op: self.limit.refused(s, op))
        self._new_sizes = NewSizes(context, self.limit, self._families)
        context.on_program.append(lambda s: self.limit.made(s))

    def provide(self, request: ProgramRequest) -> Program | list[Part] | None:
        """A padded program for the segment, or its parts; None where it runs as it was recorded."""
        s, arrays = request.segment, request.arrays
        if request.is_piece:
            return self._families.serve(s, arrays, compiles=False, is_piece=True)
        may_be_parts = request.may_be_divided and not s.on_host
        if may_be_parts and self._small.by_cpu_kernels(s, self._families.form(s)):
            if not self._context.is_stored(self._context.exact_key(s)):
                return [(0, len(s.nodes), True)]
        if may_be_parts and s.cut == PART and self._part_by_cpu_kernels(s):
            return [(0, len(s.nodes), True)]
        form = self._families.form(s)
        if may_be_parts and self.limit.is_reached(s, form):
            return self._serve_beyond_limit(request)
        padded = self._families.serve(s, arrays, compiles=not may_be_parts)
        if padded is None and may_be_parts:
            is_new = self._families.is_new(s)
            if parts := self._new_sizes.by_cpu_kernels(s):
                return parts
            if is_new and self.limit.is_much_larger(s, form):
                return self._serve_beyond_limit(request)
            padded = self._families.serve(s, arrays)
        if padded is not None:
            self.limit.padded(s, form)
        return padded

    def serves(self, piece: Segment) -> bool:
        """Return whether a program on padded arrays serves one op."""
        return self._families.serves(piece)

    def comment(self, segment: Segment, reason: Any) -> Any:
        """The reason to compile a segment as it is, with why padded arrays do not serve it."""
        return self._families.comment(segment, reason)

    def note_exact(self, segment: Segment, program: Program) -> None:
        """Take note of a segment that runs as it was recorded."""
        self._families.remember(segment, program)

    def _serve_beyond_limit(self, request: ProgramRequest) -> Program | list[Part] | None:
        # One program for many sizes is wanted, not one for each op and size.
        request.may_wait = False
        s, arrays = request.segment, request.arrays
        padded = self._families.serve(s, arrays, compiles=False)
        if padded is not None:
            return padded
        if self._families.recurs(s) or self._context.is_stored(self._context.exact_key(s)):
            return None
        if self.limit.recurs(s, self._families.form(s)):
            return self._families.serve(s, arrays)
        if (parts := self.limit.parts(s)) is None:
            padded = self._families.serve(s, arrays)
            if padded is not None:
                return padded
            if self._families.problem(s):
                parts = self.limit.parts(s, by_sizes=True)
        self._warn(s, parts)
        return parts

    def _part_by_cpu_kernels(self, s: Segment) -> bool:
        """Count a run of a part that no program serves; whether CPU kernels are to run it.

        They do until they have taken as long as a compile. By then many of its sizes are known.
        """
        if not all(self._context.may_run_on_host(n, products=True) for n in s.nodes):
            return False
        if self._families.serves(s) or self._context.is_stored(self._context.exact_key(s)):
            return False
        form = self._families.form(s)
        if self._parts.pays(form, host_seconds(s), compile_seconds(s.nodes)):
            return False
        self._families.observe(s)
        return True

    def _warn(self, s: Segment, parts: list[Part] | None) -> None:
        found = self.limit.to_warn_of(s, parts) if config().performance_warnings else None
        if found is None:
            return
        node, programs = found
        in_parts = "what differs runs by CPU kernels, the rest too until a program of it pays"
        then = in_parts if parts else "each such step is compiled"
        problem = self._families.problem(s)
        self._context.warn(
            node.line or s.last_line,
            RecompileLimitWarning(
                f"{programs} programs were compiled for this step, and its ops differ again.",
                values={
                    "first op that differs": node.name,
                    **({"not on padded arrays": problem} if problem else {}),
                    "from now on": then,
                    "step ends at": s.last_line,
                },
                line=node.line or None,
            ),
        )
