"""Connections of processes that are not of the job, to the ports on which it listens."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from threads_as_ranks import while_inside
from tpu_core.pjrt import handshake

HEADER = handshake._HEADER
GREETING_BYTES = len(handshake._MAGIC) + handshake._NONCE_BYTES


def garbage(stranger: socket.socket, chance: random.Random) -> None:
    stranger.sendall(chance.randbytes(chance.randrange(1, 1000)))


def web(stranger: socket.socket, chance: random.Random) -> None:
    stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


def silence(stranger: socket.socket, chance: random.Random) -> None:
    pass


def reset(stranger: socket.socket, chance: random.Random) -> None:
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()


def half_open(stranger: socket.socket, chance: random.Random) -> None:
    stranger.sendall(handshake._MAGIC)
    stranger.shutdown(socket.SHUT_WR)


def slow(stranger: socket.socket, chance: random.Random) -> None:
    for byte in message(b"\0" * 32, "slow")[:40]:
        stranger.sendall(bytes([byte]))
        time.sleep(0.01)


def huge_length(stranger: socket.socket, chance: random.Random) -> None:
    stranger.sendall(HEADER.pack(handshake._MAGIC, bytes(32), 0xFFFF) + bytes(1 << 16))


def huge_gloo_length(stranger: socket.socket, chance: random.Random) -> None:
    stranger.sendall(struct.pack("<Q", 1 << 62) + bytes([255]) * 64)


def guess(stranger: socket.socket, chance: random.Random) -> None:
    stranger.sendall(message(nonce(stranger), "presence 0", chance.randbytes(32)))


def replay(stranger: socket.socket, chance: random.Random) -> None:
    """What a process of the job has answered to another nonce."""
    nonce(stranger)
    secret = os.environ.get("STRANGERS_KNOW", "").encode()
    stranger.sendall(message(chance.randbytes(32), "presence 0", secret))


def nonce(stranger: socket.socket) -> bytes:
    greeting = b""
    while len(greeting) < GREETING_BYTES:
        part = stranger.recv(GREETING_BYTES - len(greeting))
        if not part:
            raise ConnectionResetError
        greeting += part
    return greeting[len(handshake._MAGIC) :]


def message(nonce: bytes, subject: str, secret: bytes = b"") -> bytes:
    """That of a client with a secret."""
    own, wanted = bytes(32), subject.encode()
    head = HEADER.pack(handshake._MAGIC, own, len(wanted)) + wanted
    return head + handshake.code(secret, b"client", nonce + own, wanted)


KINDS: tuple[Callable[[socket.socket, random.Random], None], ...] = (
    garbage,
    web,
    silence,
    reset,
    half_open,
    slow,
    huge_length,
    huge_gloo_length,
    guess,
    replay,
)


def visit(
    port: int, kind: Callable[[socket.socket, random.Random], None], chance: random.Random
) -> tuple[int, socket.socket]:
    """Connect as a stranger of some kind; the connection stays open unless that is its kind.

    Returns:
        The port that it comes from, and the connection.
    """
    stranger = socket.create_connection(("127.0.0.1", port), 0.1)
    own = int(stranger.getsockname()[1])
    with contextlib.suppress(OSError):  # it was dropped
        kind(stranger, chance)
    return own, stranger


def listening(processes: Collection[int]) -> set[int]:
    """TCP ports on which processes listen."""
    by_inode = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # LISTEN
                by_inode[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    found = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                inode = os.readlink(descriptor).removeprefix("socket:[").removesuffix("]")
                if inode in by_inode:
                    found.add(by_inode[inode])
    return found


def descendants(process: int) -> list[int]:
    """A process and all that it has started."""
    found = [process]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += descendants(int(child))
    return found


@contextmanager
def at_all_ports(
    processes: Collection[int], spared: Collection[int] = (), seed: int = 0, most: int = 2000
) -> Iterator[dict[int, int]]:
    """Strangers of all kinds, at all ports of processes and of those that they start.

    Args:
        processes: Of the job.
        spared: Ports that get none.
        seed: Of what they send.
        most: How many come.

    Yields:
        For each stranger the port that it came from, and the one that it came to.
    """
    came: dict[int, int] = {}

    def come(is_over: threading.Event) -> None:
        chance, kept, kinds = random.Random(seed), [], itertools.cycle(KINDS)
        while not is_over.wait(0.005) and len(came) < most:
            with contextlib.suppress(OSError):  # a process or a port has gone
                ports = listening([d for p in processes for d in descendants(p)]) - set(spared)
                # New ports first: they are not open for long.
                known = set(came.values())
                for port in sorted(ports, key=lambda p: p in known):
                    own, stranger = visit(port, next(kinds), chance)
                    came[own] = port
                    kept.append(stranger)
                    if len(kept) > 200:
                        kept.pop(chance.randrange(100)).close()
        for stranger in kept:
            stranger.close()

    with while_inside(come):
        yield came
