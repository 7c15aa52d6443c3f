"""Mutual authentication of a connection by a secret of the job, and ports that demand it.

A challenge and response with HMAC-SHA256 (as in RFC 2195, in both directions): the server sends a
nonce, the client one of its own, what it wants, and a code over all of it; the server answers with
its own code. The secret is never sent, and a recorded exchange fits no other nonce. What follows on
the connection is neither encrypted nor signed.

Only the standard library is imported: `coordinator` loads this file by its path, without torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

_MAGIC = b"tpu job\x01"
_NONCE_BYTES = _CODE_BYTES = 32
_HEADER = struct.Struct(f"<{len(_MAGIC)}s{_NONCE_BYTES}sH")
# Of what a client wants: a longer one is refused before any of it is read.
_MOST_SUBJECT_BYTES = 256
_REFUSED = bytes(_CODE_BYTES)
# A client that has not finished by then is dropped.
PATIENCE_SECONDS = 10.0
_RETRY_SECONDS = 0.05
# A server that says nothing is asked again over another connection.
_ANSWER_SECONDS = 60.0
# A flood of strangers must not fill the disk: so many lines, then one where their number doubles.
_LOGGED_STRANGERS = 32
_SHOWN_BYTES = 24


class RefusedError(ConnectionError):
    """A server that holds another secret, or expects something else."""


def code(secret: bytes, side: bytes, nonces: bytes, subject: bytes) -> bytes:
    """The code by which a side shows that it has the secret."""
    return hmac.digest(secret, side + nonces + subject, hashlib.sha256)


def connect(
    address: tuple[str, int], secret: bytes, subject: str, deadline: float
) -> socket.socket:
    """Open a connection whose two sides have the same secret.

    Args:
        address: Host and port.
        secret: Of the job.
        subject: Purpose of the connection; the server knows its own.
        deadline: Until when, on the clock of `time.monotonic`. A server that drops connections,
            as it does where it has too many, is asked again until then.

    Raises:
        RefusedError: The server answers, and has another secret or no use for the subject.
        OSError: It cannot be reached.
    """
    while True:
        left = deadline - time.monotonic()
        connection = socket.create_connection(address, max(left, 0.001))
        try:
            _prove(connection, secret, subject.encode(), deadline)
            connection.settimeout(None)
            return connection
        except (RefusedError, TimeoutError) as error:
            connection.close()
            if isinstance(error, RefusedError) or time.monotonic() >= deadline:
                raise
        except OSError:
            connection.close()
            if time.monotonic() + _RETRY_SECONDS >= deadline:
                raise
            time.sleep(_RETRY_SECONDS)
        except BaseException:
            connection.close()
            raise


def _prove(connection: socket.socket, secret: bytes, subject: bytes, deadline: float) -> None:
    limit = min(deadline, time.monotonic() + _ANSWER_SECONDS)
    greeting = _read(connection, len(_MAGIC) + _NONCE_BYTES, limit)
    if not greeting.startswith(_MAGIC):
        raise RefusedError("what listens there is not a process of this job")
    own = os.urandom(_NONCE_BYTES)
    nonces = greeting[len(_MAGIC) :] + own
    message = _HEADER.pack(_MAGIC, own, len(subject)) + subject
    connection.sendall(message + code(secret, b"client", nonces, subject))
    answer = _read(connection, _CODE_BYTES, limit)
    if not hmac.compare_digest(answer, code(secret, b"server", nonces, subject)):
        raise RefusedError("it has another secret of the job, or belongs to another one")


def _read(connection: socket.socket, count: int, limit: float) -> bytes:
    parts = b""
    while len(parts) < count:
        connection.settimeout(max(limit - time.monotonic(), 0.001))
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionResetError("the connection was dropped")
        parts += part
    return parts


def listen(host: str) -> socket.socket:
    """A socket on a free port of an address; on that of all interfaces where it is empty."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=1024)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)


@dataclass(slots=True)
class _Pending:
    """A connection that has not proved anything yet."""

    connection: socket.socket
    address: str
    steps: Generator[int, bytes, str]
    wanted: int
    until: float
    buffer: bytes = b""
    total: int = 0
    first: bytes = b""


class PeerListener:
    """A listening socket that admits connections which prove the secret, and drops all others.

    Nothing here blocks: `turn` is to be called again and again, by one thread.

    Args:
        listener: The socket; it is closed with this one.
        secret: Of the job.
        expects: Whether a connection with a subject is expected.
        admit: Called with each connection that has proved itself, and its subject.
        log: Called with a line for each one that is dropped.
        selector: That of the owner, whose entries have functions of the event mask as data.
        room: Largest number on trial at the same time; the oldest makes way for the next.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        expects: Callable[[str], bool],
        admit: Callable[[socket.socket, str], None],
        log: Callable[[str], None],
        selector: selectors.BaseSelector,
        room: int = 64,
    ) -> None:
        self._listener, self._secret = listener, secret
        self._expects, self._admit, self._log = expects, admit, log
        self._selector, self._room = selector, room
        self._pending: dict[int, _Pending] = {}  # by descriptor, the oldest first
        self._dropped = 0
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def port(self) -> int:
        """The one that it listens on."""
        return int(self._listener.getsockname()[1])

    def turn(self, seconds: float) -> None:
        """Do what there is to do; wait for at most so many seconds for something."""
        now = time.monotonic()
        if self._pending:
            first = next(iter(self._pending.values()))
            seconds = min(seconds, max(first.until - now, 0.0))
        for key, mask in self._selector.select(max(seconds, 0.0)):
            key.data(mask)
        now = time.monotonic()
        for pending in list(self._pending.values()):
            if pending.until > now:
                break
            self._drop(pending, f"nothing proved within {PATIENCE_SECONDS:g} s")

    def close(self) -> None:
        """Stop listening, and drop those on trial."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for pending in list(self._pending.values()):
            self._forget(pending)
            pending.connection.close()

    def _accept(self, _: int) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # too many open files
                self._free_places(0)
                time.sleep(_RETRY_SECONDS)
            return  # else it has gone again
        self._free_places(self._room - 1)
        connection.setblocking(False)
        shown = f"{address[0].removeprefix('::ffff:')}:{address[1]}"
        steps = self._examine(connection)
        pending = _Pending(connection, shown, steps, 0, time.monotonic() + PATIENCE_SECONDS)
        try:
            pending.wanted = next(steps)
        except OSError as error:
            connection.close()
            self._note(f"{shown}: {error}")
            return
        self._pending[connection.fileno()] = pending
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._receive(pending))

    def _free_places(self, places: int) -> None:
        while len(self._pending) > places:
            self._drop(next(iter(self._pending.values())), "too many connections")

    def _examine(self, connection: socket.socket) -> Generator[int, bytes, str]:
        """Yields how many bytes are wanted next, and returns the subject."""
        nonce = os.urandom(_NONCE_BYTES)
        connection.send(_MAGIC + nonce)
        magic, theirs, length = _HEADER.unpack((yield _HEADER.size))
        if magic != _MAGIC:
            raise RefusedError("not a client of this job")
        if length > _MOST_SUBJECT_BYTES:
            raise RefusedError(f"{length} bytes announced")
        subject = yield length
        proof = yield _CODE_BYTES
        nonces = nonce + theirs
        if not hmac.compare_digest(proof, code(self._secret, b"client", nonces, subject)):
            connection.send(_REFUSED)
            raise RefusedError("another secret, or a replay")
        wanted = subject.decode()
        if not self._expects(wanted):
            connection.send(_REFUSED)
            raise RefusedError(f"not expected: {wanted!r}")
        connection.send(code(self._secret, b"server", nonces, subject))
        return wanted

    def _receive(self, pending: _Pending) -> None:
        if pending.connection.fileno() < 0:  # it made way in this turn
            return
        try:
            part = pending.connection.recv(pending.wanted - len(pending.buffer))
            if not part:
                raise ConnectionResetError("closed by the other side")
            pending.total += len(part)
            pending.first = (pending.first + part)[:_SHOWN_BYTES]
            pending.buffer += part
            while len(pending.buffer) == pending.wanted:  # again, where the next part has no bytes
                whole, pending.buffer = pending.buffer, b""
                pending.wanted = pending.steps.send(whole)
        except BlockingIOError:
            return
        except StopIteration as done:
            self._forget(pending)
            self._admit(pending.connection, done.value)
        except (OSError, UnicodeDecodeError) as error:
            self._drop(pending, str(error))

    def _forget(self, pending: _Pending) -> None:
        del self._pending[pending.connection.fileno()]
        self._selector.unregister(pending.connection)

    def _drop(self, pending: _Pending, why: str) -> None:
        self._forget(pending)
        with contextlib.suppress(OSError):
            # What is in the way still, or else the other side is reset before it reads the answer.
            pending.connection.recv(1 << 16)
        pending.connection.close()
        said = f"{pending.total} bytes, {pending.first!r}" if pending.total else "no byte"
        self._note(f"{pending.address}: {why} ({said})")

    def _note(self, what: str) -> None:
        self._dropped += 1
        number = self._dropped
        if number <= _LOGGED_STRANGERS or number & (number - 1) == 0:
            count = f" ({number} so far)" if number > _LOGGED_STRANGERS else ""
            self._log(f"Dropped a connection that is not of the job, from {what}{count}")


class PeerHandshake:
    """Connections between processes of a job, which prove to each other that they have its secret.

    The secret is never sent. What follows on a connection is neither encrypted nor signed.

    Args:
        secret: Of the job.

    Attributes:
        RefusedError: Raised by `connect`; a `ConnectionError`.

    Example:
        >>> handshake = PeerHandshake(secret)
        >>> listener = handshake.listen("", expected.__contains__, admit, print, selector)
        >>> listener.turn(0.2)  # in the process that is connected to
        >>> handshake.connect(("10.0.0.2", 4711), "rank 1", time.monotonic() + 60)  # in the other
    """

    RefusedError = RefusedError

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def connect(self, address: tuple[str, int], subject: str, deadline: float) -> socket.socket:
        """Open a connection.

        Args:
            address: Host and port.
            subject: Purpose of the connection; the server knows its own.
            deadline: Until when, on the clock of `time.monotonic`. A server that drops connections,
                as it does where it has too many, is asked again until then.

        Raises:
            PeerHandshake.RefusedError: The server answers, and has another secret or no use for the
                subject.
            OSError: It cannot be reached.
        """
        return connect(address, self._secret, subject, deadline)

    def listen(
        self,
        host: str,
        expects: Callable[[str], bool],
        admit: Callable[[socket.socket, str], None],
        log: Callable[[str], None],
        selector: selectors.BaseSelector,
    ) -> PeerListener:
        """A free port that admits connections which prove the secret, and drops all others.

        Args:
            host: Address to listen on; all interfaces where it is empty.
            expects: Whether a connection with a subject is expected.
            admit: Called with each connection that has proved itself, and its subject.
            log: Called with a line for each one that is dropped.
            selector: That of the owner, whose entries have functions of the event mask as data.

        Returns:
            A listener with ``port``, ``turn(seconds)``, which does what there is to do and is to be
            called again and again by one thread, and ``close()``.
        """
        return PeerListener(listen(host), self._secret, expects, admit, log, selector)
