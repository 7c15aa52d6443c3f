"""Programs on the CPU platform find the memory that they freed."""

from __future__ import annotations

import pytest
import torch

from interpreter import clean
from tpu_core import modes
from tpu_core.compiler import context

_FAULTS = """
    import resource, torch

    def step():
        torch.full((16 << 20,), 1.0, device="tpu")  # 64 MB, freed at once
        torch.tpu.synchronize()

    faults = []
    for _ in range(40):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(sorted(faults)[20])
"""


def test_memory_is_kept_unless_told_otherwise() -> None:
    pages = (64 << 20) // 4096
    settings = {"TPU_EAGER_MODE": "strict", "TPU_PLATFORM": "cpu"}
    assert int(clean(_FAULTS, **settings)) < pages / 10
    assert int(clean(_FAULTS, **settings, TPU_KEEP_MEMORY="0")) > pages / 2


_SCATTERED = """
    import numpy
    from tpu_core.pjrt.host_memory import give_back_free_memory, keep_freed_memory

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

    assert keep_freed_memory()
    blocks = [numpy.ones(64 << 10, numpy.uint8) for _ in range(3200)]  # 200 MB
    kept = blocks[::8]
    del blocks
    before = resident()
    give_back_free_memory()
    print(before - resident(), len(kept))
"""


def test_free_memory_between_blocks_in_use_is_given_back() -> None:
    freed = int(clean(_SCATTERED).split()[0])
    assert freed > 100


@pytest.mark.parametrize(("ops", "times"), [(5, 0), (80, 2)])
def test_memory_is_given_back_around_the_compile_of_a_large_program(
    ops: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(context, "give_back_free_memory", lambda: calls.append(None))
    x = torch.arange(3.0).to("tpu")
    with modes.using(modes.Mode("whole", max_ops=0)):
        for _ in range(ops):
            x = x * 0.75
        assert x[0].item() == 0
    assert len(calls) == times


_CHAIN = """
    import resource, torch
    from tpu_core import _C

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

    t = torch.arange(5e6, device="tpu")  # 20 MB
    t.sin().sum().item()
    _C.limit_free_memory(40 << 20)
    before = peak()
    for _ in range(30):
        t = (t * 1.01).sin()
    t.sum().item()
    print(peak() - before)
"""


def test_free_memory_is_limited() -> None:
    # Three tensors at most are there at a time; 100 MB more are free without a limit (glibc 2.36).
    assert int(clean(_CHAIN, TPU_TIERS="host")) < 60 + 40 + 20
