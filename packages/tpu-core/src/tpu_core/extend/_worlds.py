"""Worlds of processes."""

from __future__ import annotations

from tpu_core.pjrt import distributed
from tpu_core.runtime import join_world


class World(distributed.World):
    """The processes that share a client.

    Attributes:
        name: The same in all of them, and of no other world.
        rank: Number of this process.
        size: Number of processes.

    Example:
        >>> port = World.start_coordinator("job", 2, "127.0.0.1", secret)  # in one process
        >>> World("job", 0, 2).join(("127.0.0.1", port), secret, "127.0.0.1", 60.0)
        >>> World.current()
        World(name='job', rank=0, size=2)
    """

    __slots__ = ()

    def join(self, address: tuple[str, int], secret: bytes, interface: str, timeout: float) -> None:
        """Make the device one of this world; values on it move to the new client.

        Args:
            address: Host and port of its coordinator.
            secret: Of the job.
            interface: Address at which the CPU platform's collectives listen; "" for jaxlib's
                choice.
            timeout: Seconds to wait for the other processes.

        Raises:
            ProcessGroupError: The device was used before and cannot be started again, the
                coordinator does not take this process, or others do not come.
            OSError: The coordinator cannot be reached.
        """
        join_world(lambda: distributed.join(self, address, secret, interface, timeout))
