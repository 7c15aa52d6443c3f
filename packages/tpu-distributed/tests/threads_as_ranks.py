"""Threads that each play a rank of a group, or work beside a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LIMIT = 20.0  # seconds


def in_turn(size: int, play: Callable[[int], Any]) -> list[Any]:
    """What each rank returns or raises, all at the same time."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = play(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
        assert not thread.is_alive()
    return results


@contextmanager
def while_inside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run ``work`` in a thread until the block is left, which the event tells it."""
    is_over = threading.Event()
    thread = threading.Thread(target=work, args=(is_over,))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
