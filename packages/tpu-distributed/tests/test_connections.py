"""Exchanges between threads, each of which plays a rank."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

import spawn
from threads_as_ranks import LIMIT, in_turn
from tpu_distributed import addresses
from tpu_distributed.connections import Connections


@contextmanager
def ranks(size: int) -> Iterator[list[Connections]]:
    store = dist.HashStore()
    made = in_turn(size, lambda rank: Connections(store, rank, size, LIMIT))
    try:
        yield made
    finally:
        for one in made:
            one.close()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13])
def test_payloads_come_to_all_ranks(size: int) -> None:
    with ranks(size) as made:
        for number in range(3):

            def play(rank: int, number: int = number) -> Any:
                return made[rank].exchange((number, 7, 0, 0), bytes([rank, number, 255]), LIMIT)

            for heard, payloads in in_turn(size, play):
                assert all(heard.same)
                assert heard.any == (number != 0, True, False, False)
                assert payloads == [bytes([rank, number, 255]) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("position", range(4))
def test_all_ranks_hear_of_one_that_differs(size: int, position: int) -> None:
    for odd in range(size):
        with ranks(size) as made:

            def play(rank: int, odd: int = odd, made: Any = made) -> Any:
                numbers = [5, 0, 0, 9]
                numbers[position] += rank == odd
                # What ranks tell that differ need not have one length.
                return made[rank].exchange(numbers, b"payload"[rank == odd :], LIMIT)

            for heard, payloads in in_turn(size, play):
                assert heard.same == tuple(i != position for i in range(4))
                assert heard.any == tuple(i in (0, 3, position) for i in range(4))
                assert payloads == []


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_who_comes_after_the_others_gave_up_gets_an_error(size: int) -> None:
    with ranks(size) as made:
        gave_up = threading.Barrier(size)

        def play(rank: int) -> Any:
            late = rank == size - 1
            if late:
                gave_up.wait(LIMIT)
            try:
                return made[rank].exchange((1, 1, 0, 0), b"", LIMIT if late else 0.2)
            finally:
                if not late:
                    gave_up.wait(LIMIT)

        errors = in_turn(size, play)
        assert all(isinstance(error, OSError) for error in errors), errors
        assert any(isinstance(error, TimeoutError) for error in errors[:-1])
        # The messages of the others are there, and then that they are of no use.
        assert isinstance(errors[-1], ConnectionAbortedError)
        assert "rank" in str(errors[-1])


def test_who_ends_after_an_exchange_does_not_spoil_it() -> None:
    with ranks(2) as made:

        def play(rank: int) -> Any:
            if rank == 1:
                time.sleep(0.2)
            heard, _ = made[rank].exchange((1, 1, 0, 0), b"", LIMIT)
            made[rank].close()
            return heard

        # Rank 1 sees the end of rank 0's connections as it reads its message.
        assert all(all(heard.same) for heard in in_turn(2, play))


def test_a_close_ends_the_wait_of_the_others() -> None:
    with ranks(3) as made:

        def play(rank: int) -> Any:
            if rank == 1:
                time.sleep(0.2)
                return made[rank].close()
            return made[rank].exchange((1, 1, 0, 0), b"", LIMIT)

        started = time.monotonic()
        results = in_turn(3, play)
        assert isinstance(results[0], OSError)
        assert isinstance(results[2], OSError)
        assert time.monotonic() - started < LIMIT / 2


def test_others_than_ranks_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    store = dist.HashStore()

    def play(rank: int) -> Any:
        if rank == 1:
            store.wait(["address/0"])
            host, port, _ = store.get("address/0").decode().split()
            for greeting in (b"GET / HTTP/1.1\r\n\r\n" + b" " * 40, b""):
                with socket.create_connection((host, int(port)), LIMIT) as stranger:
                    stranger.sendall(greeting)
        return Connections(store, rank, 2, LIMIT)

    made = in_turn(2, play)
    heard = in_turn(2, lambda rank: made[rank].exchange((3, 0, 0, 0), b"", LIMIT)[0])
    assert all(all(one.same) for one in heard)
    for one in made:
        one.close()


def test_a_rank_that_does_not_connect() -> None:
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match="(?i)time"):
        Connections(store, 0, 2, 0.3)


@pytest.mark.parametrize("master", ["localhost", socket.gethostname(), "", "no.such.host.invalid"])
def test_a_process_is_reached_where_it_is(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    if "invalid" in master:
        assert addresses.own_host() == master  # the error names what was set
        return
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection((addresses.own_host(), port), timeout=10).close()


def test_a_host_that_knows_its_name_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "the.master")
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    assert addresses.own_host() == "the.master"  # others know that by another address


def test_another_host_named_as_master(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the addresses for documentation: on no machine.
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    own = spawn.own_address_towards("192.0.2.1") or "192.0.2.1"
    assert addresses.own_host() == own
