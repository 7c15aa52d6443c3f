"""A process that holds the coordination service of a world for as long as the world lasts.

A process ends when the coordination service of its PJRT client does. Held by rank 0, the service
would take all others with it when rank 0 ends, be it as planned. This process ends once every
process that had connected to it is gone, which it sees by their connections.

It is run by its path, with nothing of this project or torch imported::

    python coordinator.py SIZE HEARTBEAT_SECONDS

It prints the port of the service and the port to connect to.
"""

from __future__ import annotations

import selectors
import socket
import sys

_REGISTER_SECONDS = 600.0  # a world that is not complete by then never will be


def serve(size: int, heartbeat: int) -> None:
    """Hold the service for ``size`` processes until all of them are gone."""
    from jaxlib import _jax

    family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, dualstack_ipv6=socket.has_ipv6)
    with socket.socket(family) as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    service = _jax.get_distributed_runtime_service(
        f"[::]:{port}", size, heartbeat_timeout=heartbeat, recoverable=True
    )
    print(port, listener.getsockname()[1], flush=True)
    wait_until_alone(listener, size)
    service.shutdown()


def wait_until_alone(listener: socket.socket, size: int) -> None:
    """Accept connections, and return when ``size`` of them were closed again."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        came = gone = 0
        while gone < size:
            ready = selector.select(_REGISTER_SECONDS if came < size else None)
            if not ready:
                return
            for key, _ in ready:
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    selector.register(connection, selectors.EVENT_READ)
                    came += 1
                else:  # nothing is ever sent: it was closed
                    selector.unregister(key.fileobj)
                    gone += 1


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
