"""Few ops on few elements that end in a read: programs once they have come often enough.

A line search, a sampler or a metric asks the device for a number after each few ops, and takes
another way from there. Each way would be a program, which takes longer to compile than hundreds
of runs by PyTorch's CPU kernels: the read waits for the inputs in any case, and copies of a few
elements take no longer than the start of a program.
"""

from __future__ import annotations

from tpu_core.config import config
from tpu_core.extend import BuildContext, Segment
from tpu_eager.bucketing.host_runs import HostRuns
from tpu_eager.costs import HOST_RUN, SMALL, nbytes

READS = ("item", "copy to the host", "boolean mask index", "nonzero")
OPS = 8_192  # run for a form, which takes about as long as its compile
_MOST_OPS = 128  # of a segment


class SmallReads:
    """Counts the runs of small segments that end in a read.

    Example:
        >>> SmallReads().by_cpu_kernels(segment, form)
        True
    """

    def __init__(self) -> None:
        self._ops = HostRuns()

    def by_cpu_kernels(self, s: Segment, form: str) -> bool:
        """Count a run of a segment that has no program; whether CPU kernels are to run it.

        Args:
            s: The segment.
            form: Its digest without sizes.
        """
        if not config().recompile_limit or not is_small(s):
            return False
        return self._ops.add(form, len(s.nodes) + HOST_RUN) <= OPS


def is_small(s: Segment) -> bool:
    """Return whether a segment ends in a read, and runs on the host at little cost."""
    if s.cut not in READS or len(s.nodes) > _MOST_OPS:
        return False
    if nbytes(s, range(len(s.slots))) > SMALL:
        return False
    return all(BuildContext.may_run_on_host(n, products=True) for n in s.nodes)
