"""Programs for many sizes that several threads ask for at once."""

from __future__ import annotations

import sys
import threading

import pytest
import torch


@pytest.fixture
def frequent_switches():
    before = torch.tpu.eager_mode, sys.getswitchinterval()
    torch.tpu.eager_mode = "fused"  # of every thread
    sys.setswitchinterval(1e-6)
    yield
    torch.tpu.eager_mode = before[0]
    sys.setswitchinterval(before[1])


def test_threads_with_other_sizes_of_one_program(frequent_switches) -> None:
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for n in range(first, first + 24, 4):
                x = torch.arange(n, device="tpu", dtype=torch.float32)
                got = ((x * 1.5).sum() + (x + 1) @ x).item()
                y = torch.arange(n, dtype=torch.float32)
                assert got == pytest.approx(((y * 1.5).sum() + (y + 1) @ y).item(), rel=1e-5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(3 + k,), daemon=True) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
