"""A world of processes: one PJRT client over the devices of all, and programs that run on several.

The coordination service is our own rather than `jax.distributed`'s: with that one the death of a
process kills the others. jax finds its client where `jax.distributed.initialize` would have put it,
so that JAX code in the same process sees the same world.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax._src import xla_bridge
from jax._src.lib import _jax, xla_client

from tpu_core.errors import ProcessGroupError
from tpu_core.pjrt import handshake, relay
from tpu_core.pjrt.client import Client, compile_options
from tpu_core.pjrt.local_service import LocalService

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
        size: Number of processes.

    Example:
        >>> World.current()
        World(name='a1b2', rank=0, size=4)
    """

    name: str
    rank: int
    size: int

    @staticmethod
    def current() -> World | None:
        """The world that this process is in, or None."""
        return _world

    @staticmethod
    def start_coordinator(world: str, size: int, host: str, secret: bytes) -> int:
        """Start the process that coordinates a new world.

        Args:
            world: Its name.
            size: Number of its processes.
            host: Address to listen on; empty for all interfaces.
            secret: Of the job.

        Returns:
            The port that joining takes.

        Raises:
            ProcessGroupError: It did not start.
        """
        script = str(Path(__file__).with_name("coordinator.py"))
        command = [sys.executable, "-P", script, str(size), str(_HEARTBEAT_SECONDS), host]
        # A session of its own: it must outlive this process, whatever ends that.
        process = subprocess.Popen(
            command,
            # jaxlib warns that a world whose processes may be lost is an experiment of its own.
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):  # it has ended; see below
            process.stdin.write(f"{world}\n{secret.hex()}\n")
            process.stdin.close()
        line = process.stdout.readline()
        process.stdout.close()
        try:
            return int(line)
        except ValueError:
            raise ProcessGroupError(
                f"The coordination service did not start; it ended with {process.wait(5)}.",
                remedy="See what it printed.",
            ) from None


_world: World | None = None
# Connections to the coordinators of this world and former ones: a client lives as long as the
# process, and must not outlive its service.
_presence: list[socket.socket] = []


def join(
    world: World, address: tuple[str, int], secret: bytes, interface: str, timeout: float
) -> None:
    """Become a process of a world. The client that is started next spans it.

    Args:
        world: The world; one that this process was in before is left.
        address: Host and port of its coordinator.
        secret: Of the job.
        interface: Address at which the CPU platform's collectives listen; jaxlib's choice where
            it is empty.
        timeout: Seconds to wait for the other processes.

    Raises:
        ProcessGroupError: The coordinator does not take this process for one of the job, or others
            do not come.
        OSError: It cannot be reached.
    """
    global _world
    deadline = time.monotonic() + timeout

    def reach(what: str) -> socket.socket:
        subject = f"{world.name} {what} {world.rank}"
        connection = handshake.connect(address, secret, subject, deadline)
        relay.keep_alive(connection)
        return connection

    try:
        connection = reach("presence")
    except handshake.RefusedError as error:
        raise ProcessGroupError(
            "The coordinator of the job does not take this process for one of it.",
            values={"coordinator": f"{address[0]}:{address[1]}", "cause": error},
            remedy="Set the same TPU_JOB_SECRET for all processes of the job, or none.",
        ) from None
    _presence.append(connection)
    _wait_for_all(connection, world, deadline)
    local = LocalService(lambda: reach("service"))
    try:
        client = _jax.get_distributed_runtime_client(
            local.address,
            world.rank,
            init_timeout=max(1, int(timeout)),
            heartbeat_timeout=_HEARTBEAT_SECONDS,
            shutdown_timeout=_SHUTDOWN_SECONDS,
            # A process that ends must not wait for the others, nor fail where they are gone.
            shutdown_on_destruction=False,
        )
        client.connect()
    finally:
        local.settle()
    state = jax_distributed.global_state
    state.client, state.process_id, state.num_processes = client, world.rank, world.size
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if xla_bridge.backends_are_initialized():
        jax.clear_caches()
        xla_bridge._clear_backends()
    xla_bridge.register_backend_factory(
        "cpu", partial(_cpu_client, interface), priority=0, fail_quietly=False
    )
    _world = world


def _wait_for_all(connection: socket.socket, world: World, deadline: float) -> None:
    """Until all processes have come: jaxlib's client ends its process where one does not."""
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        if connection.recv(1) != relay.COMPLETE:
            raise ProcessGroupError("The coordinator of the job has ended.")
    except TimeoutError:
        raise ProcessGroupError(
            "Not all processes of the job have come in time.",
            values={"processes": world.size},
            remedy="See what the others, and the coordinator on the stderr of rank 0, have said.",
        ) from None
    finally:
        connection.settimeout(None)


def _cpu_client(interface: str) -> Any:
    """CPU client as jax makes it, but for the address of gloo's sockets."""
    client = jax_distributed.global_state.client
    collectives = None
    if interface and client is not None:
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=interface)
    return xla_bridge.make_cpu_client(collectives)


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
