"""Connections that other ranks of a group open to this one, while it opens its own."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from tpu_core.extend import PeerHandshake

logger = logging.getLogger("tpu_distributed")
_TURN_SECONDS = 0.2


class PeerAcceptor:
    """A port, open in a ``with`` block, at which a thread admits the ranks that are to come.

    Args:
        host: Address to listen on; empty for all interfaces.
        secret: Of the job.
        expected: Token that each of them presents, and the key that it gets in `wait`.
    """

    def __init__(self, host: str, secret: bytes, expected: Mapping[str, int]) -> None:
        self._expected = expected
        self._came: dict[int, socket.socket] = {}
        self._is_open = True
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._listener = PeerHandshake(secret).listen(
            host,
            expected.__contains__,
            self._admit,
            lambda line: logger.warning("%s", line),
            self._selector,
        )
        self.port = self._listener.port
        self._thread = threading.Thread(target=self._run, name="tpu-peer-acceptor", daemon=True)

    def __enter__(self) -> PeerAcceptor:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_open = False
        self._thread.join()
        for connection in self._came.values():  # those that nobody waited for
            connection.close()

    def wait(self, deadline: float) -> dict[int, socket.socket]:
        """The connections of all that were expected.

        Args:
            deadline: Until when, on the clock of `time.monotonic`.

        Raises:
            TimeoutError: Some did not come.
        """
        with self._changed:
            left = max(deadline - time.monotonic(), 0.0)
            if not self._changed.wait_for(lambda: len(self._came) == len(self._expected), left):
                raise TimeoutError("timed out")
            came, self._came = self._came, {}
        return came

    def _run(self) -> None:
        while self._is_open:
            self._listener.turn(_TURN_SECONDS)
        self._listener.close()
        self._selector.close()

    def _admit(self, connection: socket.socket, subject: str) -> None:
        with self._changed:
            number = self._expected[subject]
            # One that was dropped before it heard of its success comes again.
            if (former := self._came.pop(number, None)) is not None:
                former.close()
            self._came[number] = connection
            if len(self._came) == len(self._expected):
                self._is_open = False
                self._changed.notify_all()
