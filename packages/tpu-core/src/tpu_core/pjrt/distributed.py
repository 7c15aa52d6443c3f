"""A world of processes: one PJRT client over the devices of all, and programs that run on several.

The coordination service is our own rather than `jax.distributed`'s: with that one the death of a
process kills the others. jax finds its client where `jax.distributed.initialize` would have put it,
so that JAX code in the same process sees the same world.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax._src import xla_bridge
from jax._src.lib import _jax, xla_client

from tpu_core.errors import ProcessGroupError
from tpu_core.pjrt import coordinator
from tpu_core.pjrt.client import Client, compile_options

# Without a sign of life for so long, jaxlib ends a process when it goes on: one that was stopped in
# a debugger, say. Nothing here needs the signs: other ranks see at once that a process has ended.
_HEARTBEAT_SECONDS = 24 * 60 * 60
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
# Connections to the coordinators of this world and former ones: a client lives as long as the
# process, and must not outlive its service.
_presence: list[socket.socket] = []


def current_world() -> World | None:
    """The world that this process is in, or None."""
    return _world


def start_coordinator(size: int) -> tuple[int, int]:
    """Start the process that coordinates a new world.

    Args:
        size: Number of processes of the world.

    Returns:
        The ports that `join` takes.

    Raises:
        ProcessGroupError: It did not start.
    """
    command = [sys.executable, "-P", coordinator.__file__, str(size), str(_HEARTBEAT_SECONDS)]
    # A session of its own: it must outlive this process, whatever ends that.
    process = subprocess.Popen(
        command,
        # jaxlib warns that a world whose processes may be lost is an experiment of its own.
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    process.stdout.close()
    try:
        service, presence = map(int, line.split())
    except ValueError:
        raise ProcessGroupError(
            f"The coordination service did not start; it ended with {process.wait(5)}.",
            remedy="See what it printed.",
        ) from None
    return service, presence


def join(world: World, host: str, ports: tuple[int, int], timeout: float) -> None:
    """Become a process of a world. The client that is started next spans it.

    Args:
        world: The world; one that this process was in before is left.
        host: Where its coordinator runs.
        ports: From `start_coordinator`.
        timeout: Seconds to wait for the other processes.
    """
    global _world
    service, presence = ports
    connection = socket.create_connection((host, presence), timeout)
    connection.settimeout(None)
    _presence.append(connection)
    client = _jax.get_distributed_runtime_client(
        f"{host}:{service}",
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


def compile_replicated(module: str | bytes, devices: Sequence[Any], client: Client) -> Any:
    """Compile StableHLO that each of some devices runs on arrays of its own.

    Args:
        module: Text or bytecode; its replica ``i`` is ``devices[i]``.
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
