"""Python's garbage collector, out of the way of what makes many objects that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collection in this block, in any thread.

    One that looks through all that torch and jax hold takes as long as tracing a training step.
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
    """As `paused`, and what was made counts as old: modules, which stay."""
    with paused():
        yield
        if not gc.get_freeze_count():
            # All that is there joins the oldest generation, which is rarely looked through; as
            # young objects they would be, in the first step.
            gc.freeze()
            gc.unfreeze()
