"""Calls that trace or compile: the exit of the process waits for those of other threads.

Python ends a daemon thread that asks for the GIL while the interpreter ends, by unwinding its
stack. Where the thread traces or compiles, frames of JAX are on it, whose destructors would use the
interpreter without the GIL.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from tpu_core import _C

_MOST_SECONDS = 5.0

_Function = TypeVar("_Function", bound=Callable[..., object])
_inside: set[int] = set()  # threads
_ends = False


def finished_at_exit(function: _Function) -> _Function:
    """A function of whose calls the exit waits for those that run, and delays the others.

    Example:
        >>> finished_at_exit(len)([1, 2])
        2
    """

    @functools.wraps(function)
    def call(*args: object) -> object:
        thread = threading.get_ident()
        if thread in _inside or thread == threading.main_thread().ident:
            return function(*args)
        # Before `_ends` is read: `finish` sets it and then looks here.
        _inside.add(thread)
        try:
            # The caller of a backward waits for autograd's threads.
            if _ends and torch._C._current_graph_task_id() == -1:
                _inside.discard(thread)
                # Nearly always for the end; a handler at the exit may wait for this thread, though.
                time.sleep(_MOST_SECONDS)
                _inside.add(thread)
            return function(*args)
        finally:
            _inside.discard(thread)

    return cast(_Function, call)


def finish() -> None:
    """Wait until no other thread is in such a call, for a few seconds at most."""
    global _ends
    if _C.in_bad_fork():
        return
    _ends = True
    deadline = time.monotonic() + _MOST_SECONDS
    while _inside and time.monotonic() < deadline:
        time.sleep(0.001)
