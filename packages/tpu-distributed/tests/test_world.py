"""Where the processes of a world find its first one."""

from __future__ import annotations

import socket

import pytest

from tpu_distributed import world


@pytest.mark.parametrize("master", ["localhost", socket.gethostname(), "", "no.such.host.invalid"])
def test_rank_0_is_reached_where_it_is(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    if "invalid" in master:
        assert world._host() == master  # the error names what was set
        return
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection((world._host(), port), timeout=10).close()


def test_another_host_named_as_master(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the addresses for documentation: on no machine.
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            own = probe.getsockname()[0]
        except OSError:  # a machine without a network
            own = "192.0.2.1"
    assert world._host() == own
