"""Bytes that are passed on between a client of the coordination service and the service."""

from __future__ import annotations

import os
import selectors
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest

from threads_as_ranks import LIMIT, in_turn
from tpu_core.pjrt import relay
from tpu_core.pjrt.local_service import LocalService


def received(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def test_bytes_in_both_directions_and_the_end() -> None:
    ours, left = socket.socketpair()
    right, theirs = socket.socketpair()
    data = [os.urandom(6_000_003), os.urandom(5_000_001)]
    ended = []
    with selectors.DefaultSelector() as selector:
        pump = relay.Pump(selector, left, right, ended.append)

        def pass_on() -> None:
            while not ended:
                for key, mask in selector.select(0.05):
                    key.data(mask)

        def play(number: int) -> bytes:
            if number == 2:
                pass_on()
                return b""
            one = (ours, theirs)[number]
            writer = threading.Thread(target=one.sendall, args=(data[number],))
            writer.start()
            if number:
                time.sleep(0.2)  # what is not read waits
            parts = b""
            while len(parts) < len(data[1 - number]):
                parts += one.recv(1 << 20)
            writer.join()
            if number == 0:
                one.close()
            return parts

        got = in_turn(3, play)
        assert got[:2] == [data[1], data[0]]
        assert ended == [left]
        pump.close()
        assert theirs.recv(10) == b""
        theirs.close()


def test_a_private_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:  # short, whoever runs the tests
        for name, stays in (("short", True), ("l" * 100, False), ("of 100%", False)):
            (Path(base) / name).mkdir()
            monkeypatch.setattr(tempfile, "tempdir", f"{base}/{name}")
            folder = relay.private_folder()
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
            assert folder.startswith(base) == stays
            relay.remove(folder)
            assert not os.path.exists(folder)


def test_a_client_does_not_hear_that_its_service_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service, theirs = socket.socketpair()  # of a process that holds the service
    local = LocalService(lambda: service)
    path = local.address.removeprefix("unix:")
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(LIMIT)
        client.connect(path)
        client.sendall(b"to the service")
        assert theirs.recv(100) == b"to the service"
        theirs.sendall(b"to the client")
        assert client.recv(100) == b"to the client"
        local.settle()
        until = time.monotonic() + LIMIT
        while os.path.exists(path) and time.monotonic() < until:
            time.sleep(0.005)
        assert not os.path.exists(os.path.dirname(path))
        theirs.close()
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(100)
    assert "The connection to the coordinator of the job was lost" in caplog.text
