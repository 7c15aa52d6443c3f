"""The process that coordinates a world is there as long as any process of the world is."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tpu_core.pjrt import coordinator


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", coordinator.__file__, "2", "10"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        yield started
        started.kill()


def test_it_ends_with_the_last_process(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    service, presence = map(int, process.stdout.readline().split())
    first = socket.create_connection(("localhost", presence), 5)
    second = socket.create_connection(("localhost", presence), 5)
    first.close()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    socket.create_connection(("localhost", service), 5).close()  # still served
    second.close()
    assert process.wait(20) == 0
