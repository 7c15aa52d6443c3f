"""Threads that each play a rank of a group."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
