"""Control of Python's garbage collector, so that it skips torch and jax in the first step."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Python 3.12 counts its immortal objects, a few hundred, as frozen; to be dropped with it.
OF_PYTHON = 1000 if sys.version_info[:2] == (3, 12) else 0
# Made after `importing` has frozen all objects. It tells whether the user froze others since, as
# `gc.get_freeze_count` does, which walks all that is frozen: 40 ms for torch and jax.
_mark: list[object] | None = None
_frozen_to_fork = False


@contextmanager
def paused() -> Iterator[None]:
    """No collection in this block, in any thread.

    A full one takes as long as tracing a training step.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """As `paused`; all objects there are stay out of collections until `resume`."""
    global _mark
    with paused():
        yield
        if gc.get_freeze_count() <= OF_PYTHON:
            gc.freeze()
            _mark = [object()]


def resume() -> None:
    """End what `importing` began: the first program is there, or many ops have run."""
    global _mark
    mark, _mark = _mark, None
    # A mark that is frozen is not among the referrers: the user has frozen objects too, and wants
    # them so. `gc.get_objects` would hold tuples that other threads are about to make, which is a
    # SystemError there.
    if mark is not None and any(found is mark for found in gc.get_referrers(mark[0])):
        gc.unfreeze()


def freeze_in_children() -> None:
    """Collect nothing in a forked child that was there before the fork.

    What XLA's threads were busy with they have left locked, and they are not in the child: to
    destroy it there is to wait for ever. Frozen before the fork, it is not collected either while
    the child calls what others have registered to be called first.
    """
    os.register_at_fork(
        before=_freeze_to_fork, after_in_parent=_thaw_in_parent, after_in_child=gc.freeze
    )


def _freeze_to_fork() -> None:
    global _frozen_to_fork
    resume()
    if gc.get_freeze_count() <= OF_PYTHON:  # the user has frozen nothing, no other thread forks
        gc.freeze()
        _frozen_to_fork = True


def _thaw_in_parent() -> None:
    global _frozen_to_fork
    if _frozen_to_fork:
        _frozen_to_fork = False
        gc.unfreeze()
