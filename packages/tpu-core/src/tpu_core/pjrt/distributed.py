"""A world of processes: one PJRT client over the devices of all, and programs that run on several.

The coordination service is our own rather than `jax.distributed`'s: with that one the death of a
process kills the others. jax finds its client where `jax.distributed.initialize` would have put it,
so that JAX code in the same process sees the same world.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax._src import xla_bridge
from jax._src.lib import _jax, xla_client

from tpu_core.pjrt.client import Client, compile_options

_HEARTBEAT_SECONDS = 10
_SHUTDOWN_SECONDS = 5


@dataclass(frozen=True, slots=True)
class World:
    """The processes that share a client.

    Attributes:
        name: The same in all of them, and of no other world.
        rank: Number of this process.
        size: How many there are.
    """

    name: str
    rank: int
    size: int


_world: World | None = None
# Services of former worlds: to end one while a client of it lives would end that client's process.
_services: list[Any] = []


def current_world() -> World | None:
    """The world that this process is in, or None."""
    return _world


def start_service(size: int) -> int:
    """Start the coordination service of a new world in this process, which is its rank 0.

    Args:
        size: Number of processes.

    Returns:
        Its port.
    """
    with _free_port() as port:
        pass
    _services.append(
        _jax.get_distributed_runtime_service(
            f"[::]:{port}",
            size,
            heartbeat_timeout=_HEARTBEAT_SECONDS,
            shutdown_timeout=_SHUTDOWN_SECONDS,
            recoverable=True,
        )
    )
    return port


def join(world: World, address: str, timeout: float) -> None:
    """Become a process of a world. The client that is started next spans it.

    Args:
        world: The world; one that this process was in before is left.
        address: ``"host:port"`` of its coordination service.
        timeout: Seconds to wait for the service.
    """
    global _world
    client = _jax.get_distributed_runtime_client(
        address,
        world.rank,
        init_timeout=max(1, int(timeout)),
        heartbeat_timeout=_HEARTBEAT_SECONDS,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        # A process that ends must not wait for the others, nor fail where they are gone.
        shutdown_on_destruction=False,
    )
    client.connect()
    state = jax_distributed.global_state
    state.client, state.process_id, state.num_processes = client, world.rank, world.size
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if xla_bridge.backends_are_initialized():
        jax.clear_caches()
        xla_bridge._clear_backends()
    _world = world


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as s:
        s.bind(("", 0))
        yield s.getsockname()[1]


def members(client: Client) -> tuple[Any, ...]:
    """The device of each process of the world, by rank: the first one where it has several."""
    first: dict[int, Any] = {}
    for device in client.backend.devices():
        first.setdefault(device.process_index, device)
    own = client.devices[0]
    first[own.process_index] = own
    return tuple(first[i] for i in sorted(first))


def _options(devices: Sequence[Any], client: Client) -> Any:
    options = compile_options(devices[0], client)
    build = options.executable_build_options
    options.num_replicas = build.num_replicas = len(devices)
    options.num_partitions = build.num_partitions = 1
    ids = np.array([[device.id] for device in devices])
    build.device_assignment = xla_client.DeviceAssignment.create(ids)
    return options


def compile_replicated(module: str, devices: Sequence[Any], client: Client) -> Any:
    """Compile StableHLO text that each of some devices runs on arrays of its own.

    Args:
        module: The text; its replica ``i`` is ``devices[i]``.
        devices: JAX devices, those of other processes included.
        client: The client.
    """
    return client.backend.compile_and_load(
        module, xla_client.DeviceList(tuple(devices)), _options(devices, client)
    )


def deserialize_replicated(data: bytes, devices: Sequence[Any], client: Client) -> Any:
    """The inverse of `serialize` for what `compile_replicated` gave."""
    return client.backend.deserialize_executable(
        data, xla_client.DeviceList(tuple(devices)), _options(devices, client)
    )
