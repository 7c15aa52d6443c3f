"""Processes that are not of the job, at the ports on which it listens."""

from __future__ import annotations

import random
import re
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import spawn
import strangers
from threads_as_ranks import LIMIT, in_turn, while_inside
from tpu_core.errors import ProcessGroupError
from tpu_core.pjrt import handshake
from tpu_distributed import addresses, job_secret
from tpu_distributed.connections import Connections

SECRET = bytes(range(32))
DROPPED = re.compile(r"Dropped a connection that is not of the job, from 127\.0\.0\.1:(\d+): (.*)")


class Open:
    """A listener that a thread runs, what it has admitted, and its log."""

    def __init__(self, room: int) -> None:
        self.admitted: list[tuple[socket.socket, str]] = []
        self.lines: list[str] = []
        self.selector = selectors.DefaultSelector()
        self.listener = handshake.PeerListener(
            handshake.listen("127.0.0.1"),
            SECRET,
            lambda subject: subject.startswith("rank"),
            lambda connection, subject: self.admitted.append((connection, subject)),
            self.lines.append,
            self.selector,
            room,
        )
        self.port = self.listener.port

    def connect(self, secret: bytes = SECRET, subject: str = "rank 3") -> socket.socket:
        """As a process of the job does."""
        address = ("127.0.0.1", self.port)
        return handshake.connect(address, secret, subject, time.monotonic() + LIMIT)

    def wait_for(self, admitted: int) -> None:
        """Until so many are admitted, which the client knows a moment before."""
        until = time.monotonic() + LIMIT
        while len(self.admitted) < admitted and time.monotonic() < until:
            time.sleep(0.005)
        assert len(self.admitted) == admitted

    def dropped(self, port: int) -> str:
        """Why a connection from a port was dropped, once it is."""
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            for line in list(self.lines):
                found = DROPPED.fullmatch(line)
                assert found, line
                if int(found[1]) == port:
                    return found[2]
            time.sleep(0.005)
        raise AssertionError(self.lines)


@contextmanager
def opened(room: int = 64) -> Iterator[Open]:
    made = Open(room)

    def mind(is_over: threading.Event) -> None:
        while not is_over.is_set():
            made.listener.turn(0.02)

    try:
        with while_inside(mind):
            yield made
    finally:
        made.listener.close()
        made.selector.close()
        for connection, _ in made.admitted:
            connection.close()


def test_two_sides_with_the_same_secret() -> None:
    with opened() as made:
        client = made.connect()
        client.sendall(b"what follows")
        made.wait_for(1)
        ((server, subject),) = made.admitted
        assert subject == "rank 3"
        server.settimeout(LIMIT)
        assert server.recv(100) == b"what follows"
        server.sendall(b"an answer")
        assert client.recv(100) == b"an answer"
        client.close()
        assert made.lines == []


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (strangers.garbage, "not a client of this job"),
        (strangers.web, "nothing proved"),
        (strangers.silence, r"nothing proved within 1 s \(no byte\)"),
        (strangers.reset, ""),
        (strangers.half_open, "closed by the other side"),
        (strangers.slow, "nothing proved"),
        (strangers.huge_length, "65535 bytes announced"),
        (strangers.huge_gloo_length, "not a client of this job"),
        (strangers.guess, "another secret, or a replay"),
        (strangers.replay, "another secret, or a replay"),
    ],
)
def test_a_stranger_is_dropped_and_named(
    kind: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "PATIENCE_SECONDS", 1.0)
    chance = random.Random(5)  # of whose first number of bytes the header is less
    with opened() as made:
        own, stranger = strangers.visit(made.port, kind, chance)
        with stranger:
            assert re.match(why, made.dropped(own))
            if kind is not strangers.reset:
                stranger.settimeout(LIMIT)
                ends(stranger)
        made.connect().close()  # one of the job is admitted all the same
        made.wait_for(1)


def ends(stranger: socket.socket) -> None:
    try:
        while stranger.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass


def test_what_a_process_of_the_job_has_sent_is_of_no_use_a_second_time() -> None:
    with opened() as made:
        with handshake.listen("127.0.0.1") as between:
            recorded = []

            def record() -> None:
                client, _ = between.accept()
                with client, socket.create_connection(("127.0.0.1", made.port)) as server:
                    client.sendall(server.recv(4096))
                    recorded.append(client.recv(4096))
                    server.sendall(recorded[0])
                    client.sendall(server.recv(4096))

            thread = threading.Thread(target=record)
            thread.start()
            handshake.connect(between.getsockname(), SECRET, "rank 1", time.monotonic() + LIMIT)
            thread.join(LIMIT)
        made.wait_for(1)
        with socket.create_connection(("127.0.0.1", made.port)) as stranger:
            strangers.nonce(stranger)
            stranger.sendall(recorded[0])
            assert "replay" in made.dropped(stranger.getsockname()[1])
            assert stranger.recv(100) == bytes(32)
            assert stranger.recv(100) == b""
        assert len(made.admitted) == 1


def test_another_secret_or_purpose_is_refused_at_once() -> None:
    with opened() as made:
        with pytest.raises(handshake.RefusedError, match="another secret"):
            made.connect(bytes(32))
        with pytest.raises(handshake.RefusedError):
            made.connect(subject="stranger")
        with pytest.raises(handshake.RefusedError):  # which takes a turn after the lines
            made.connect(bytes(32))
        assert "another secret" in made.lines[0]
        assert "not expected: 'stranger'" in made.lines[1]
        assert made.admitted == []


def test_a_server_without_the_secret_is_not_believed() -> None:
    with handshake.listen("127.0.0.1") as listener:

        def pretend() -> None:
            server, _ = listener.accept()
            with server:
                server.sendall(handshake._MAGIC + bytes(32))
                server.recv(4096)
                server.sendall(bytes(range(32)))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(handshake.RefusedError):
            handshake.connect(listener.getsockname(), SECRET, "rank 0", time.monotonic() + LIMIT)
        thread.join(LIMIT)


def test_strangers_that_say_nothing_keep_none_of_the_job_out() -> None:
    with opened(room=8) as made:
        idle = [socket.create_connection(("127.0.0.1", made.port)) for _ in range(100)]
        for _ in range(20):
            made.connect().close()
        made.wait_for(20)
        assert len(made.listener._pending) <= 8
        # One line each for the first ones; then where their number has doubled.
        assert 32 < len(made.lines) < 45
        assert made.lines[-1].endswith("(64 so far)")
        for one in idle:
            one.close()


def test_exchanges_of_ranks_to_whose_ports_strangers_come() -> None:
    store, over = dist.HashStore(), threading.Event()

    def play(rank: int) -> Any:
        if rank == 2:  # the others' ports are open until it comes
            assert over.wait(LIMIT)
        return Connections(store, rank, 3, LIMIT)

    def come() -> None:
        chance = random.Random(0)
        kept = []
        for rank in (0, 1):
            port = int(store.get(f"address/{rank}").decode().split()[1])
            kept += [strangers.visit(port, kind, chance)[1] for kind in strangers.KINDS]
        over.set()
        for one in kept:
            one.close()

    store.set("secret", job_secret.create())
    thread = threading.Thread(target=come)
    thread.start()
    made = in_turn(3, play)
    thread.join(LIMIT)
    heard = in_turn(3, lambda rank: made[rank].exchange((3, 0, 0, 0), bytes([rank]), LIMIT))
    assert all(all(one.same) and told == [b"\0", b"\1", b"\2"] for one, told in heard)
    for one in made:
        one.close()


def test_ranks_with_different_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()

    def of_group(store: Any, rank: int, timeout: float) -> bytes:
        return bytes([rank]) * 32

    monkeypatch.setattr(job_secret, "of_group", of_group)
    started = time.monotonic()
    results = in_turn(2, lambda rank: Connections(store, rank, 2, LIMIT))
    assert any("TPU_JOB_SECRET must be the same" in str(error) for error in results), results
    assert all(isinstance(error, OSError) for error in results)
    assert time.monotonic() - started < LIMIT / 2


def test_where_the_secret_comes_from() -> None:
    store, other, third = dist.HashStore(), dist.HashStore(), dist.HashStore()
    told = in_turn(2, lambda rank: job_secret.of_group(store, rank, LIMIT, {}))
    assert told[0] == told[1]
    assert len(told[0]) == 32
    assert job_secret.of_group(other, 0, LIMIT, {}) != told[0]
    environ = {"TPU_JOB_SECRET": "a" * 40}
    told = in_turn(3, lambda rank: job_secret.of_group(third, rank, LIMIT, environ))
    assert told[0] == told[1] == told[2]
    assert third.get("secret") == b"environment"  # it is not told
    with pytest.raises(ProcessGroupError, match="not for this one"):
        job_secret.of_group(third, 1, LIMIT, {})
    with pytest.raises(ProcessGroupError, match="has 5 characters"):
        job_secret.of_group(store, 0, LIMIT, {"TPU_JOB_SECRET": "short"})
    with pytest.raises(RuntimeError, match="(?i)time"):
        job_secret.of_group(dist.HashStore(), 1, 0.1, {})


@pytest.mark.parametrize(
    ("environ", "size", "expected"),
    [
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1"}, 4, "127.0.0.1"),
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "the.master"}, 4, ""),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, 4, "127.0.0.1"),
        ({"MASTER_ADDR": "127.0.0.1"}, 2, "127.0.0.1"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, 2, ""),
    ],
)
def test_on_which_interface_ports_are(
    environ: dict[str, str], size: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def resolve(host: str, *more: Any) -> Any:
        return real("127.0.0.1" if host == "the.master" else host, *more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert addresses.interface(size, environ) == expected


def test_the_interface_towards_another_host() -> None:
    own = spawn.own_address_towards("192.0.2.1") or ""
    assert addresses.interface(4, {"MASTER_ADDR": "192.0.2.1"}) == own


def port_of_the_store(process: int) -> int:
    entries = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    (entry,) = (e for e in entries if e.startswith(b"MASTER_PORT="))
    return int(entry.partition(b"=")[2])


@pytest.mark.parametrize("groups", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_a_job_to_whose_ports_strangers_come(
    groups: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret = job_secret.create()
    monkeypatch.setenv("STRANGERS_KNOW", secret)
    more = {"TPU_JOB_SECRET": secret, "TMPDIR": str(tmp_path)}
    processes = spawn.start("cases_strangers", 2, expected=250, GROUPS=str(groups), **more)
    pids = [p.pid for p in processes]
    # That of the store is PyTorch's.
    with strangers.at_all_ports(pids, {port_of_the_store(pids[0])}) as came:
        outputs = spawn.finish(processes, 250)
    for output in outputs:
        for name in spawn.cases_of("cases_strangers"):
            assert f'CASE ["{name}", null]' in output, output
        assert "detected fatal errors" not in output
        assert "The connection to the coordinator of the job was lost" in output
    assert len(came) > 10 * groups
    dropped = [DROPPED.findall(output) for output in outputs]
    assert all(int(port) in came for lines in dropped for port, _ in lines)
    assert "tpu coordinator: Dropped a connection" in outputs[0]
    # At the ports that a rank has while groups are made.
    assert all(re.search(r"(?m)^Dropped a connection", output) for output in outputs)
