"""A process that holds the coordination service of a world for as long as the world lasts.

A process ends when the coordination service of its PJRT client does. Held by rank 0, the service
would take all others with it when rank 0 ends, be it as planned. This process ends once every
process that had connected to it is gone, which it sees by their connections.

The service itself has no authentication. It listens on a Unix socket in a folder of the user's
alone; from the network it is reached by connections that prove the secret of the job, and bytes of
all others are dropped with a line on stderr.

It is run by its path, with nothing of this project or torch imported::

    python coordinator.py SIZE HEARTBEAT_SECONDS HOST

A line of stdin has the name of the world, and another one the secret in hex. An empty HOST stands
for all interfaces. It prints the port to connect to.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpu_core.pjrt import handshake, relay
else:  # not as parts of the package, which imports torch; after all other folders
    sys.path.append(os.path.dirname(__file__))
    import handshake
    import relay

_REGISTER_SECONDS = 600.0  # a world that is not complete by then never will be
_RETURN_SECONDS = 30.0  # those that have come and gone before may come again
# Besides the two connections of each process.
_ROOM = 64


class Presence:
    """Presence of a world's processes, by a connection of each; announces the last arrival.

    Args:
        size: Number of processes.
        selector: As of `handshake.PeerListener`.
    """

    def __init__(self, size: int, selector: selectors.BaseSelector) -> None:
        self._size, self._selector = size, selector
        self._came: set[int] = set()
        self._present: dict[socket.socket, int] = {}
        self._until = time.monotonic() + _REGISTER_SECONDS

    @property
    def is_over(self) -> bool:
        """True if all have come and gone, or some have not come for long."""
        if len(self._came) < self._size:
            return time.monotonic() > self._until
        return not self._present

    def enter(self, connection: socket.socket, rank: int) -> None:
        """A process is there until its connection ends."""
        was_complete = len(self._came) == self._size
        self._came.add(rank)
        self._present[connection] = rank
        self._until = time.monotonic() + _REGISTER_SECONDS
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._hear(connection))
        if len(self._came) == self._size:
            for one in (connection,) if was_complete else tuple(self._present):
                with contextlib.suppress(OSError):  # it has gone, and `_hear` will find that
                    one.send(relay.COMPLETE)

    def _hear(self, connection: socket.socket) -> None:
        try:
            if connection.recv(1 << 12):  # processes of the job send nothing
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._selector.unregister(connection)
        connection.close()
        del self._present[connection]
        if not self._present:
            self._until = min(self._until, time.monotonic() + _RETURN_SECONDS)


def serve(size: int, heartbeat: int, host: str, world: str, secret: bytes) -> None:
    """Hold the service for ``size`` processes until all of them are gone."""
    from jaxlib import _jax

    _open_more_files()
    folder = relay.private_folder()
    path = f"{folder}/service"
    try:
        service = _jax.get_distributed_runtime_service(
            f"unix:{path}", size, heartbeat_timeout=heartbeat, recoverable=True
        )
        with selectors.DefaultSelector() as selector:
            presence = Presence(size, selector)
            subjects = {
                f"{world} {what} {r}" for what in ("presence", "service") for r in range(size)
            }

            def admit(connection: socket.socket, subject: str) -> None:
                relay.keep_alive(connection)
                _, what, rank = subject.split()
                if what == "presence":
                    presence.enter(connection, int(rank))
                    return
                inner = socket.socket(socket.AF_UNIX)
                inner.connect(path)
                pump = relay.Pump(selector, connection, inner, lambda _: pump.close())

            listener = handshake.PeerListener(
                handshake.listen(host),
                secret,
                subjects.__contains__,
                admit,
                log,
                selector,
                2 * size + _ROOM,
            )
            print(listener.port, flush=True)
            while not presence.is_over:
                listener.turn(_RETURN_SECONDS / 2)
            listener.close()
        service.shutdown()
    finally:
        relay.remove(folder)


def log(line: str) -> None:
    """A line on stderr, that of the first rank."""
    try:
        print(f"tpu coordinator: {line}", file=sys.stderr, flush=True)
    except OSError:  # a pipe of rank 0's that has ended before
        pass


def _open_more_files() -> None:
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    name, key = (sys.stdin.readline().strip() for _ in range(2))
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], name, bytes.fromhex(key))
