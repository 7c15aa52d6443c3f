"""Waits that end at a signal: Ctrl-C reaches the program while it waits for XLA.

Python handles signals between two of its instructions, on its first thread. A wait inside XLA is
one instruction, however long it takes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import CodeType
from typing import Any, TypeVar

Result = TypeVar("Result")

# Seconds for which the processor is given away and no more: a short wait is over before another
# thread has begun to wait.
_AWAKE = 1e-4
_MOST_WAITERS = 8  # one stays behind, until its array is computed, where a wait was interrupted


def is_handling_signals() -> bool:
    """Return whether signals are handled on this thread."""
    return threading.current_thread() is threading.main_thread()


def is_from_signal(error: BaseException) -> bool:
    """Return whether a signal handler of the program raised an exception: a time limit, say.

    It says nothing about what it stopped, which stays to be done.
    """
    if not is_handling_signals():
        return False
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code in handlers for frame, _ in frames)


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):  # SIG_DFL and the like
        return None
    if not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)


def pass_on(error: Exception) -> None:
    """Raise an exception again where a signal handler raised it, for an ``except Exception``.

    Example:
        >>> except Exception as error:
        ...     pass_on(error)
        ...     return False  # it cannot be lowered
    """
    if is_from_signal(error):
        raise error


def wait_for(array: Any) -> None:
    """Wait until an array is computed. Its error is raised by the read.

    Args:
        array: A `jax.Array` or a `tpu_core.pjrt.padded_array.PaddedArray`.
    """
    if not is_handling_signals():
        return
    until = time.perf_counter() + _AWAKE
    while not _is_over(array):
        if time.perf_counter() > until:
            # Python handles signals while it waits for a thread of its own.
            with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts none
                _waiters().submit(_block, array).result()
            return
        time.sleep(0)


@functools.cache
def _waiters() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_WAITERS, thread_name_prefix="tpu-wait")


def _block(array: Any) -> None:
    with contextlib.suppress(Exception):  # it was donated, or could not be computed
        array.block_until_ready()


def _is_over(array: Any) -> bool:
    try:
        return bool(array.is_ready())
    except Exception:  # it was donated, or could not be computed
        return True


class InterruptibleCalls:
    """Calls that hold no lock of Python's for long, made by threads of their own.

    A call whose wait was interrupted goes on, and its result is that of the next call of its key.

    Args:
        name: Of the threads.

    Example:
        >>> calls = InterruptibleCalls("compile")
        >>> calls.run(key, lambda: compile_module(module, device, client))
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._left: dict[str, Future[Any]] = {}
        self._lock = threading.Lock()

    def run(self, key: str, call: Callable[[], Result]) -> Result:
        """Result of ``call()``, or of the call of this key that an interrupt left behind.

        Args:
            key: Names the result.
            call: Makes it.
        """
        with self._lock:
            future = self._left.pop(key, None)
        if future is None:
            if not is_handling_signals():
                return call()
            future = _start(call, self._name)
        try:
            result: Result = future.result()
        except BaseException:
            if not future.done():
                with self._lock:
                    self._left[key] = future
            raise
        return result


def _start(call: Callable[[], Result], name: str) -> Future[Result]:
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    # Not a daemon: at the interpreter's exit it would be inside XLA.
    try:
        threading.Thread(target=work, name=name).start()
    except RuntimeError:  # the interpreter ends, and starts none any more
        work()
    return future


_IMPORTS = InterruptibleCalls("import")


def import_whole(name: str) -> None:
    """Import a module, and all of it where the wait for it is interrupted.

    A package whose import was interrupted is imported anew, but not those of its submodules that
    were there: they are missing among its attributes in whatever uses it, for good.

    Args:
        name: Of the module.
    """
    if name not in sys.modules:
        _IMPORTS.run(name, lambda: importlib.import_module(name))
