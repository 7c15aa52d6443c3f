"""Dispatcher of collectives: a thread that issues them in call order.

A collective must wait for the other ranks before it is sent, and small ones run in the thread that
sends them. A caller need not wait for either: its results are asynchronous values, and ops that
read them wait. The order is one for all groups of the process: a device enters collectives one
by one, and two ranks that enter those of two groups in different order deadlock.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from tpu_core.extend import on_synchronize

T = TypeVar("T")

# How long the end of the process waits for what is not sent yet.
_EXIT_SECONDS = 5.0


class Dispatch(Protocol):
    """Interface of what a `Sender` dispatches."""

    is_sent: bool

    def send(self) -> list[Any]:
        """Send it and say that it is sent; raises nothing.

        Returns:
            Arrays that the device computes for it.
        """


class Sender:
    """The thread, which runs while there are groups. A waiting thread drains the queue."""

    def __init__(self) -> None:
        self._jobs: deque[Dispatch] = deque()
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._is_woken = False
        self._turn = threading.Lock()  # of the thread that sends
        self._users = 0
        self._thread: threading.Thread | None = None
        self._newest: list[Any] = []
        self._sent_by = 0

    def start(self) -> None:
        """One group more uses it."""
        self._users += 1
        if self._thread is None:
            # A daemon: the end of the process must not wait for ranks that never come.
            self._thread = threading.Thread(target=self._run, name="tpu collectives", daemon=True)
            self._thread.start()

    def stop(self, wait: bool = True) -> None:
        """One group less uses it.

        Args:
            wait: Whether to return when everything is sent and, with the last group, the thread has
                ended.
        """
        if wait:
            self.finish()
        self._users -= 1
        if self._users == 0 and self._thread is not None:
            thread, self._thread = self._thread, None
            self._newest = []
            self._wake.put(False)
            if wait:
                thread.join()

    def put(self, job: Dispatch, waits: bool) -> None:
        """Send a job after those before it.

        Args:
            job: The job.
            waits: Whether the caller is going to `wait` for it at once.
        """
        self._jobs.append(job)
        # Where the caller waits it sends it: the thread would only take the turn from it.
        if not waits and not self._is_woken:
            self._is_woken = True
            self._wake.put(True)

    def wait(self, job: Dispatch) -> None:
        """Return when a job is sent."""
        if job.is_sent:
            return
        with self._turn:
            while not job.is_sent:
                self._send_next()

    def finish(self, seconds: float = -1) -> list[Any]:
        """Return when everything is sent, or after so many seconds.

        Returns:
            Arrays of the last collective.
        """
        if self._turn.acquire(timeout=seconds):
            try:
                while self._jobs:
                    self._send_next()
            finally:
                self._turn.release()
        return self._newest

    def _send_next(self) -> None:
        me = threading.get_ident()
        if me != self._sent_by:
            # XLA:CPU keeps the order of what one thread sends.
            for array in self._newest:
                with contextlib.suppress(Exception):  # deleted or failed: it has run
                    array.block_until_ready()
            self._sent_by = me
        self._newest = self._jobs.popleft().send() or self._newest

    def _run(self) -> None:
        while self._wake.get():
            self._is_woken = False  # what is put from here on may be too late for the loop
            while self._jobs:
                with self._turn:
                    if self._jobs:
                        self._send_next()


class Task(Generic[T]):
    """A function as a job.

    Args:
        function: Function to call in its turn.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._results: list[T] = []
        self._error: BaseException | None = None
        self.is_sent = False

    def send(self) -> list[Any]:
        """Call it."""
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._error = error
        self.is_sent = True
        return []

    def finish(self) -> T:
        """Result of the function once it was called; raises its error."""
        SENDER.wait(self)
        if self._error is not None:
            raise self._error
        return self._results[0]


SENDER = Sender()
on_synchronize(SENDER.finish)
atexit.register(SENDER.finish, _EXIT_SECONDS)
