"""Regions in which all ranks run the same program."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from tpu_core.extend import flush, on_synchronize

if TYPE_CHECKING:
    from tpu_distributed.group import Group

_depth = 0
_differed = False  # in this region
_last: str | None = None  # label of the group of the last collective that was recorded


class spmd(contextlib.ContextDecorator):  # noqa: N801 - a function to its users
    """Declare that all ranks run the same program in a region, so that collectives fuse into it.

    Outside of such a region a collective ends the program that is being recorded, and has one of
    its own. In it, a collective is an op among others: XLA may fuse and overlap it with what is
    around it, and the ranks agree once for a program rather than for each collective. Messages,
    collectives to or from one rank (``reduce``, ``gather``, ``scatter``) and those with parts of
    different sizes stay what they are.

    The ranks compare their programs before they run. Where these differ, a `SpmdMismatchWarning`
    names a rank and an op of it, and the collectives are executed one by one until the region
    ends; the results are right all the same. What only some ranks do, such as printing a loss,
    belongs after the region.

    It is a context manager and a decorator, and holds for all threads of the process.

    Example:
        >>> @tpu_distributed.spmd()
        ... def step(x):
        ...     y = x * 2
        ...     dist.all_reduce(y)
        ...     return y + 1  # one program
    """

    def __enter__(self) -> spmd:
        global _depth, _differed, _last
        if _depth == 0:
            _differed, _last = False, None
            # What was recorded before need not be the same on all ranks.
            flush(-1, "spmd()")
        _depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _depth
        _depth -= 1
        if _depth == 0 and error is None:
            from tpu_distributed.traced_collectives import run_recorded

            # Other ranks wait for it; this one may do something else for long.
            run_recorded()


def records(group: Group) -> bool:
    """Return whether a collective that the group is asked for is recorded. What must run first is
    run.
    """
    global _last
    if not _depth or _differed or group.size == 1 or group.whole:
        return False  # a program of all chips has the collectives of other groups, too
    if _last not in (None, group.control.label):
        from tpu_distributed.traced_collectives import run_recorded

        run_recorded()
    _last = group.control.label
    return not _differed


def _is_inside() -> bool:
    return _depth > 0 and not _differed


# DistributedDataParallel records one for each bucket.
on_synchronize(defers_events=_is_inside)


def differed() -> None:
    """Ranks were found to differ: until the region ends collectives are programs of their own."""
    global _differed
    _differed = True
