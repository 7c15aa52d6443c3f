"""The coordination service of a world as the client of a rank reaches it: a Unix socket.

A thread passes what the client sends on to the coordinator, over a connection that has proved the
secret of the job. No call of jaxlib's that waits for the service holds the GIL (measured).
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable

from tpu_core.pjrt import relay

logger = logging.getLogger("tpu_core")


class LocalService:
    """Listens for the client of this process, until `settle`.

    Args:
        reach: Opens a connection to the coordination service.

    Attributes:
        address: For the client.
    """

    def __init__(self, reach: Callable[[], socket.socket]) -> None:
        self._reach = reach
        self._folder = relay.private_folder()
        path = f"{self._folder}/client"
        self.address = f"unix:{path}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._settled, woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, lambda _: self._accept())
        self._selector.register(woken, selectors.EVENT_READ, lambda _: self._stop_listening(woken))
        self._is_listening = True
        self._pumps: set[relay.Pump] = set()
        # Those of a client whose connection to the coordinator was lost.
        self._held: list[socket.socket] = []
        threading.Thread(target=self._run, name="tpu-coordination", daemon=True).start()

    def settle(self) -> None:
        """Listen no more: a client connects once, and ends its process where that is lost."""
        self._settled.close()

    def _run(self) -> None:
        while self._is_listening or self._pumps:
            for key, mask in self._selector.select():
                key.data(mask)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            service = self._reach()
        except OSError as error:
            logger.warning("The coordination service of the job was not reached: %s.", error)
            client.close()  # who tries again
            return

        def ended(which: socket.socket) -> None:
            self._pumps.discard(pump)
            if which is client:
                pump.close()
                return
            # The client would end this process if it heard of it, and what runs does not need it.
            service.close()
            self._held.append(client)
            logger.warning(
                "The connection to the coordinator of the job was lost. What runs goes on; groups "
                "of processes that are new may not find each other."
            )

        pump = relay.Pump(self._selector, client, service, ended)
        self._pumps.add(pump)

    def _stop_listening(self, woken: socket.socket) -> None:
        for one in (woken, self._listener):
            self._selector.unregister(one)
            one.close()
        relay.remove(self._folder)
        self._is_listening = False
