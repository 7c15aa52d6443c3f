"""Programs on the CPU platform find the memory that they freed."""

from __future__ import annotations

import sys

import pytest

from interpreter import clean

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


@pytest.mark.skipif(sys.platform != "linux", reason="concerns glibc")
def test_memory_is_kept_unless_told_otherwise() -> None:
    pages = (64 << 20) // 4096
    settings = {"TPU_EAGER_MODE": "strict", "TPU_PLATFORM": "cpu"}
    assert int(clean(_FAULTS, **settings)) < pages / 10
    assert int(clean(_FAULTS, **settings, TPU_KEEP_MEMORY="0")) > pages / 2
