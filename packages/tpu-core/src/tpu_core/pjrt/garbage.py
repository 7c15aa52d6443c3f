"""jax's part in Python's garbage collection."""

from __future__ import annotations

import gc

from jax._src.lib import _jax

from tpu_core import _C


def keep_signals_out() -> None:
    """Replace jax's callback of the garbage collector, a Python function, by one that is none.

    In a forked child it does nothing: jax's takes a lock that XLA's threads hold while they hand
    over references, and a thread that is not in the child never opens it.

    A signal that comes during a collection is handled at the next instruction of Python. Were that
    the callback's, a ``KeyboardInterrupt`` would be reported as ignored, and lost.
    """
    for i, callback in enumerate(gc.callbacks):
        if getattr(callback, "__name__", "") == "_xla_gc_callback":
            gc.callbacks[i] = _C.ignoring_arguments(_jax.collect_garbage)
