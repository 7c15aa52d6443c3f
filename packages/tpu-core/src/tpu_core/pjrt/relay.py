"""Bytes passed on between two sockets, and the end of such a relay that a rank has.

jaxlib's coordination service is gRPC without authentication, so it listens on a Unix socket in a
folder of the user's alone, and so does what a rank's client connects to. Between the two hosts
bytes travel over a connection that `handshake` has authenticated.

As of `handshake`, only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import socket
import tempfile
from collections.abc import Callable

# What the coordinator sends to each process once all of a world have come.
COMPLETE = b"\x01"
_BUFFER_BYTES = 1 << 18
# sun_path has 108 bytes, less on some systems; gRPC reads an address as a URI.
_FITS = re.compile(r"/[\w./+-]{1,80}")
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


def private_folder() -> str:
    """A new folder of mode 0700, with a path that fits into the address of a Unix socket."""
    folder = tempfile.mkdtemp(prefix="tpu-")
    if not _FITS.fullmatch(folder):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="tpu-", dir="/tmp")
    return folder


def remove(folder: str) -> None:
    """Remove a folder and the sockets in it."""
    shutil.rmtree(folder, ignore_errors=True)


def keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and probes where nothing is sent for long."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Pump:
    """Passes bytes on between two sockets, in both directions, until one of them ends.

    Args:
        selector: As of `handshake.PeerListener`.
        left: One socket.
        right: The other one.
        ended: Called with the socket that ended first; both are open still.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        left: socket.socket,
        right: socket.socket,
        ended: Callable[[socket.socket], None],
    ) -> None:
        self._selector, self._ended = selector, ended
        self._other = {left: right, right: left}
        # What a socket is still to be sent.
        self._waiting = {left: b"", right: b""}
        self._masks = {left: 0, right: 0}
        for one in (left, right):
            one.setblocking(False)
        self._watch()

    def close(self) -> None:
        """Close both sockets."""
        self._forget()
        for one in self._other:
            one.close()

    def _watch(self) -> None:
        """Wait for bytes where there is room for them, and for room where there are bytes."""
        for one, other in self._other.items():
            mask = 0 if self._waiting[other] else selectors.EVENT_READ
            mask |= selectors.EVENT_WRITE if self._waiting[one] else 0
            if mask == self._masks[one]:
                continue
            if not self._masks[one]:
                self._selector.register(one, mask, self._ready(one))
            elif mask:
                self._selector.modify(one, mask, self._ready(one))
            else:
                self._selector.unregister(one)
            self._masks[one] = mask

    def _ready(self, one: socket.socket) -> Callable[[int], None]:
        return lambda mask: self._move(one, mask)

    def _move(self, one: socket.socket, mask: int) -> None:
        if not self._masks[one]:  # ended in this turn
            return
        used, other = one, self._other[one]
        try:
            if mask & selectors.EVENT_WRITE:
                self._send(one)
            if mask & selectors.EVENT_READ and not self._waiting[other]:
                self._waiting[other] = self._received(one)
                used = other
                self._send(other)
        except OSError:
            self._forget()
            self._ended(used)
            return
        self._watch()

    def _received(self, one: socket.socket) -> bytes:
        try:
            part = one.recv(_BUFFER_BYTES)
        except BlockingIOError:
            return b""
        if not part:
            raise ConnectionResetError
        return part

    def _send(self, one: socket.socket) -> None:
        if self._waiting[one]:
            with contextlib.suppress(BlockingIOError):
                self._waiting[one] = self._waiting[one][one.send(self._waiting[one]) :]

    def _forget(self) -> None:
        for one, mask in self._masks.items():
            if mask:
                self._selector.unregister(one)
            self._masks[one] = 0
