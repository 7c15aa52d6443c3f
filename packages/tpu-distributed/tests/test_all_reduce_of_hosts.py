"""The ring of sockets by which hosts reduce arrays, between threads that each play a rank."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from threads_as_ranks import LIMIT, in_turn
from tpu_distributed import _C
from tpu_distributed.connections import Connections, Reduced

REFERENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def play(size: int, role: Callable[[int, Connections], object]) -> list[object]:
    """What each rank returns or raises, all at the same time."""
    store = dist.HashStore()

    def run(rank: int) -> object:
        made = Connections(store, rank, size, LIMIT, is_ring=True)
        try:
            return role(rank, made)
        finally:
            made.close()

    return in_turn(size, run)


def reduced(source: torch.Tensor, out: torch.Tensor, op: str, *scale: float) -> Reduced:
    addresses = source.data_ptr(), out.data_ptr()
    return Reduced(*addresses, source.numel(), source.dtype, op, *scale)


def values(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    # Small whole numbers: every order of additions gives the same sum.
    return torch.randint(-3, 4, (elements,), generator=generator).to(dtype)


@pytest.mark.parametrize("op", REFERENCES)
@pytest.mark.parametrize("in_place", [False, True])
def test_all_ranks_get_the_reduction(op: str, in_place: bool) -> None:
    # Fewer elements than ranks, parts of different sizes, several segments a part.
    cases = [(2, 1), (3, 2), (3, 1000), (2, 300_001), (5, 400_003)]
    for size, elements in cases:
        for dtype in (torch.float32, torch.bfloat16, torch.int8):

            def role(rank: int, ring: Connections) -> object:
                source = values(rank, elements, dtype)  # noqa: B023 - called before the next
                out = source if in_place else torch.full_like(source, 99)
                for _ in range(2):  # one after the other on the same connections
                    ring.all_reduce(reduced(source, out, op), LIMIT)
                    result = out.clone()
                    if in_place:
                        out.copy_(values(rank, elements, dtype))  # noqa: B023
                if not in_place:
                    torch.testing.assert_close(source, values(rank, elements, dtype))  # noqa: B023
                return result

            want = values(0, elements, dtype)
            for rank in range(1, size):
                want = REFERENCES[op](want, values(rank, elements, dtype))
            for result in play(size, role):
                assert isinstance(result, torch.Tensor), result
                torch.testing.assert_close(result, want, rtol=0, atol=0)


def test_factors_and_divisors() -> None:
    def role(rank: int, ring: Connections) -> object:
        source = torch.arange(10.0) + rank
        out = torch.empty(10)
        ring.all_reduce(reduced(source, out, "SUM", 0.5, 4), LIMIT)
        torch.testing.assert_close(source, torch.arange(10.0) + rank)
        return out

    for out in play(2, role):
        torch.testing.assert_close(out, (2 * torch.arange(10.0) + 1) / 8)


def test_nan_is_kept_as_pytorch_keeps_it() -> None:
    def role(rank: int, ring: Connections) -> object:
        x = torch.tensor([1.0, float("nan") if rank else 2.0])
        ring.all_reduce(reduced(x, x, "MAX"), LIMIT)
        return x

    for x in play(2, role):
        assert isinstance(x, torch.Tensor)
        assert x[0] == 1 and x[1].isnan()


def added(ring: Connections, elements: int, timeout: float = LIMIT) -> torch.Tensor:
    x = torch.ones(elements)
    ring.all_reduce(reduced(x, x, "SUM"), timeout)
    return x


@pytest.mark.parametrize("elements", [2, 8, 1 << 20])
def test_a_rank_that_ends_is_noticed(elements: int) -> None:
    def role(rank: int, ring: Connections) -> object:
        return ring.close() if rank == 0 else added(ring, elements)

    began = time.monotonic()
    results = play(3, role)
    assert time.monotonic() - began < LIMIT / 2
    assert isinstance(results[1], ConnectionError) and isinstance(results[2], ConnectionError)


def test_a_rank_that_does_not_come_is_waited_for_and_no_longer() -> None:
    ended = threading.Event()

    def role(rank: int, ring: Connections) -> object:
        if rank == 0:
            return ended.wait(LIMIT)
        try:
            return added(ring, 1 << 20, 0.3)
        finally:
            ended.set()

    results = play(2, role)
    assert isinstance(results[1], TimeoutError), results


def test_giving_up_from_another_thread() -> None:
    def role(rank: int, ring: Connections) -> object:
        if rank == 0:
            time.sleep(0.5)
            return None
        threading.Timer(0.2, ring.close).start()
        return added(ring, 1 << 20)

    assert isinstance(play(2, role)[1], OSError)


def test_what_is_wrong_is_said() -> None:
    x, opened = torch.ones(4), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="no reduce op BAND"):
        _C.ring_all_reduce(*reduced(x, x, "BAND"), 0, 2, 0, 0, LIMIT)
    with pytest.raises(OSError, match="Bad file descriptor"):
        _C.ring_all_reduce(*reduced(x, x, "SUM"), 0, 2, 0, -1, LIMIT)
    with pytest.raises(OSError, match="Socket operation on non-socket"):
        _C.ring_all_reduce(*reduced(x, x, "SUM"), 0, 2, *[os.open(os.devnull, 0)] * 2, LIMIT)
    assert len(os.listdir("/proc/self/fd")) == opened + 1
