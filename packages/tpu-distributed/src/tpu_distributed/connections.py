"""Connections by which ranks exchange a few bytes, in as many messages as log2 of their number.

In round ``k`` of an exchange, rank ``i`` sends what it knows to rank ``i + 2**k`` and hears from
rank ``i - 2**k`` (the dissemination barrier of Hensgen, Finkel and Manber, 1988; Bruck's algorithm
for what is gathered). The thread that calls does all of it: no other has to wake up for it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from tpu_core.extend import PeerHandshake
from tpu_distributed import addresses, job_secret
from tpu_distributed._C import ring_all_reduce
from tpu_distributed.peer_acceptor import PeerAcceptor

# Numbers of a rank; bytes of payloads that follow; which numbers are the same everywhere as far as
# is known, by bits; which are not 0 everywhere.
_HEADER = struct.Struct("<4qIBB")
_ALL = 0b1111
# In place of a length, of the last message of a connection: its first number is that of the
# exchange that this rank gave up, or 0.
_END = 0xFFFFFFFF
# No message between ranks is longer.
_MOST_BYTES = 1 << 20
# A host that is gone without a word is noticed after so many seconds of silence.
_KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4}


@dataclass(frozen=True)
class Heard:
    """Result of an exchange.

    Attributes:
        same: For each number whether it is that of all ranks.
        any: For each number whether it is not 0 on some rank.
    """

    same: tuple[bool, ...]
    any: tuple[bool, ...]


class Reduced(NamedTuple):
    """An array in the memory of the host that is reduced over all ranks.

    Attributes:
        source: Its address.
        out: That of the result; it may be the same.
        elements: Number of elements.
        dtype: Theirs.
        op: ``"SUM"``, ``"PRODUCT"``, ``"MIN"`` or ``"MAX"``.
        factor: Number that each rank's elements are multiplied by first.
        divisor: Number that the result is divided by.
    """

    source: int
    out: int
    elements: int
    dtype: torch.dtype
    op: str
    factor: float = 1.0
    divisor: int = 1


class Connections:
    """Those of one rank of a group. All ranks make theirs at the same time.

    Args:
        store: Keys of this group alone.
        rank: Of this process.
        size: Number of processes.
        timeout: Seconds to wait for the others.
        is_ring: Whether those of the rank after this one and the one before it are enough, as they
            are for `all_reduce`.

    Raises:
        OSError: Another rank cannot be reached.
        TimeoutError: Some rank did not connect.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: float, is_ring: bool = False
    ) -> None:
        self._rank, self._size, self._is_ring = rank, size, is_ring
        self._distances = [1 << k for k in range(1 if is_ring else (size - 1).bit_length())]
        self._outgoing: list[socket.socket] = []
        self._incoming: list[socket.socket] = []
        try:
            self._connect(store, timeout)
        except BaseException:
            self.close()
            raise

    def exchange(
        self, numbers: Sequence[int], payload: bytes, timeout: float
    ) -> tuple[Heard, list[bytes]]:
        """Tell all ranks something, and hear what they tell.

        Args:
            numbers: Four, of 63 bits, to compare.
            payload: To gather; of the same length on all ranks whose numbers are the same.
            timeout: Seconds to wait.

        Returns:
            What is the same, and the payloads by rank, where all numbers are.

        Raises:
            TimeoutError: Some rank did not come.
            OSError: Some rank is gone.
        """
        deadline = time.monotonic() + timeout
        try:
            same, any_set, held = self._rounds(numbers, payload, deadline)
            for distance, into in zip(self._distances, self._incoming):
                self._require_not_given_up(into, numbers[0], distance)
        except BaseException:
            # Of a half of a message there is no way on; the others hear of it at once.
            self.close(numbers[0])
            raise
        heard, length = Heard(_bits(same), _bits(any_set)), len(payload)
        if same != _ALL or not length:
            return heard, []
        parts = [held[i * length : (i + 1) * length] for i in range(self._size)]
        return heard, [parts[(self._rank - r) % self._size] for r in range(self._size)]

    def all_reduce(self, what: Reduced, timeout: float) -> None:
        """Reduce an array over all ranks; every rank gets the same bits.

        Args:
            what: Of the same number of elements, dtype and op on all ranks.
            timeout: Seconds to wait.

        Raises:
            TimeoutError: Some rank did not come.
            OSError: Some rank is gone.
        """
        sockets = self._outgoing[0].fileno(), self._incoming[0].fileno()
        try:
            ring_all_reduce(*what, self._rank, self._size, *sockets, timeout)
        except BaseException:  # as of `exchange`
            self.close()
            raise

    def close(self, given_up: int = 0) -> None:
        """End them: other ranks that wait for this one get an error.

        Args:
            given_up: First number of the exchange that this rank waited for in vain.
        """
        end = _HEADER.pack(given_up, 0, 0, 0, _END, 0, 0)
        # In a ring it would be taken for elements of an array, which the end of the stream is not.
        for connection in () if self._is_ring else self._outgoing:
            with contextlib.suppress(OSError):  # the other side may have ended it
                connection.send(end)
        for connection in (*self._outgoing, *self._incoming):
            with contextlib.suppress(OSError):  # as above
                connection.shutdown(socket.SHUT_RDWR)  # ends a wait in another thread, too
            connection.close()

    def _rounds(
        self, numbers: Sequence[int], payload: bytes, deadline: float
    ) -> tuple[int, int, bytes]:
        same, any_set = _ALL, sum((n != 0) << i for i, n in enumerate(numbers))
        # Payloads of this rank, of the rank before it, and so on.
        held, length = payload, len(payload)
        for distance, out, into in zip(self._distances, self._outgoing, self._incoming):
            blocks = min(distance, self._size - distance)
            told = held[: blocks * length]
            _send(out, _HEADER.pack(*numbers, len(told), same, any_set) + told, deadline)
            *theirs, following, their_same, their_any = _HEADER.unpack(
                self._receive(into, _HEADER.size, distance, deadline)
            )
            if following == _END:
                raise ConnectionAbortedError(f"rank {self._before(distance)} has left the group")
            if following > _MOST_BYTES:
                raise ConnectionAbortedError(
                    f"rank {self._before(distance)} sends {following} bytes"
                )
            if following:
                held += self._receive(into, following, distance, deadline)
            any_set |= their_any
            same &= their_same
            for i, (a, b) in enumerate(zip(numbers, theirs)):
                same &= ~((a != b) << i)
        return same, any_set, held

    def _require_not_given_up(self, connection: socket.socket, number: int, distance: int) -> None:
        """Raise if the others gave up this exchange: a late rank still has their messages."""
        try:
            last = connection.recv(_HEADER.size, socket.MSG_PEEK)
        except OSError:  # there is nothing, mostly
            return
        # The start of the next exchange, or the end; nothing where its process has ended.
        if len(last) == _HEADER.size:
            first, *_, following, _, _ = _HEADER.unpack(last)
            if following == _END and first == number:
                raise ConnectionAbortedError(f"rank {self._before(distance)} had given up")

    def _receive(
        self, connection: socket.socket, count: int, distance: int, deadline: float
    ) -> bytes:
        parts = b""
        while len(parts) < count:
            _wait(connection, select.POLLIN, deadline)
            part = connection.recv(count - len(parts))
            if not part:
                raise ConnectionResetError(f"rank {self._before(distance)} is gone")
            parts += part
        return parts

    def _before(self, distance: int) -> int:
        return (self._rank - distance) % self._size

    def _connect(self, store: Any, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        secret = job_secret.of_group(store, self._rank, timeout)
        host = addresses.interface(self._size)
        # What is new with each set of connections: what a former one recorded is of no use.
        name = uuid.uuid4().hex
        with PeerAcceptor(host, secret, self._subjects(name)) as acceptor:
            key = f"address/{self._rank}"
            store.set(key, f"{addresses.reached_at(host)} {acceptor.port} {name}")
            for distance in self._distances:
                self._outgoing.append(self._reach(store, secret, distance, deadline))
            by_distance = acceptor.wait(deadline)
            self._incoming = [by_distance[d] for d in self._distances]
        for connection in (*self._outgoing, *self._incoming):
            _settle(connection)

    def _subjects(self, name: str) -> dict[str, int]:
        """Subjects of the expected messages, and the distance of their senders."""
        return {f"{name} from {self._before(d)}": d for d in self._distances}

    def _reach(self, store: Any, secret: bytes, distance: int, deadline: float) -> socket.socket:
        rank = (self._rank + distance) % self._size
        key = f"address/{rank}"
        store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        host, port, name = store.get(key).decode().split()
        try:
            peer = PeerHandshake(secret)
            return peer.connect((host, int(port)), f"{name} from {self._rank}", deadline)
        except PeerHandshake.RefusedError as error:
            raise ConnectionRefusedError(
                f"rank {rank} at {host}:{port} does not take this process for one of the job "
                f"({error}); {job_secret.VARIABLE} must be the same for all"
            ) from None


def _wait(connection: socket.socket, event: int, deadline: float) -> None:
    ready = select.poll()
    ready.register(connection, event)
    if not ready.poll(max(deadline - time.monotonic(), 0.0) * 1e3):
        raise TimeoutError("timed out")


def _send(connection: socket.socket, message: bytes, deadline: float) -> None:
    sent = 0
    while (sent := sent + _sent(connection, message[sent:])) < len(message):
        _wait(connection, select.POLLOUT, deadline)


def _sent(connection: socket.socket, message: bytes) -> int:
    try:
        return connection.send(message)
    except BlockingIOError:
        return 0


def _settle(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _bits(mask: int) -> tuple[bool, ...]:
    return tuple(bool(mask >> i & 1) for i in range(4))
