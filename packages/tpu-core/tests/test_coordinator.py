"""The process that coordinates a world is there as long as any process of the world is."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tpu_core.pjrt import coordinator, handshake

SECRET = bytes(32)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", coordinator.__file__, "2", "10", "127.0.0.1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as started:
        assert started.stdin is not None
        started.stdin.write(f"world\n{SECRET.hex()}\n")
        started.stdin.flush()
        yield started
        started.kill()


def enter(port: int, what: str, rank: int) -> socket.socket:
    address, deadline = ("127.0.0.1", port), time.monotonic() + 10
    return handshake.connect(address, SECRET, f"world {what} {rank}", deadline)


def test_it_ends_with_the_last_process(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    port = int(process.stdout.readline())
    first, second = enter(port, "presence", 0), enter(port, "presence", 1)
    first.close()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    enter(port, "service", 1).close()  # still served
    second.close()
    assert process.wait(20) == 0


def test_a_stranger_is_dropped_and_named(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    port = int(process.stdout.readline())
    with socket.create_connection(("127.0.0.1", port), 5) as stranger:
        stranger.settimeout(10)
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 8)
        line = next(x for x in process.stderr if x.startswith("tpu coordinator"))
        assert "127.0.0.1" in line
    enter(port, "presence", 0).close()
