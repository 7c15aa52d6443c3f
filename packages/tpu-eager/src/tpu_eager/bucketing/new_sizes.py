"""Segments of whose sizes too little is known for a program: CPU kernels run them at first.

Where ops vary, the first sizes of a form seldom come again, and two recordings relate some sizes
by chance. A program for those would run once, and a training step takes seconds to compile; by CPU
kernels it takes milliseconds, and its sizes are recorded all the same.
"""

from __future__ import annotations

from itertools import groupby

from tpu_core.config import config
from tpu_core.extend import BuildContext, Segment
from tpu_eager.bucketing.families import Families
from tpu_eager.bucketing.host_runs import HostRuns
from tpu_eager.bucketing.line_programs import COMBINE, PART
from tpu_eager.bucketing.recompile_limit import Part, RecompileLimit
from tpu_eager.costs import compile_seconds, host_seconds

_SEVERAL = 2  # forms after which ops are likely to have others
_RUNS = 5  # of a form before it has a program that may be for relations by chance
_LEAST_OPS = 8  # whose program takes much longer than a few runs


class NewSizes:
    """Runs by CPU kernels of segments whose sizes are new to their form.

    Args:
        context: The client's.
        limit: Counts the programs.
        families: Keep the sizes.
    """

    def __init__(self, context: BuildContext, limit: RecompileLimit, families: Families) -> None:
        self._context = context
        self._limit = limit
        self._families = families
        self._runs = HostRuns()

    def by_cpu_kernels(self, s: Segment) -> list[Part] | None:
        """Take note of the sizes of a segment that no program serves.

        Returns:
            Its parts, where they are new and its compile takes longer than CPU kernels do.
        """
        if not config().recompile_limit or len(s.nodes) < _LEAST_OPS or s.cut == PART:
            return None
        if not self._context.may_compile:  # it is to be refused
            return None
        if self._context.is_stored(self._context.exact_key(s)):
            return None
        parts = _parts(s)
        if parts is None or host_seconds(s) > compile_seconds(s.nodes):
            return None
        if len(self._limit.forms_alike(s)) < _SEVERAL or not self._families.learn(s):
            return None
        return None if self._runs.pays(self._families.form(s), 1, _RUNS) else parts


def _parts(s: Segment) -> list[Part] | None:
    """The segment for CPU kernels, but for what combines the words of checks; None where an op is
    not for them.
    """
    parts: list[Part] = []
    for combines, group in groupby(enumerate(s.nodes), lambda x: x[1].name == COMBINE):
        indices, nodes = zip(*group)
        if not combines and not all(BuildContext.may_run_on_host(n, products=True) for n in nodes):
            return None
        parts.append((indices[0], indices[-1] + 1, not combines))
    return parts
