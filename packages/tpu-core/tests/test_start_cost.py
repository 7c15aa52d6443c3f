"""What starting the device and tracing do to the garbage collector: nothing that stays."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from tpu_core import gc_control
from tpu_core.compiler import segment as segments


@pytest.fixture(autouse=True)
def restored():
    yield
    gc.unfreeze()
    gc.enable()


class Cycle:
    def __init__(self):
        self.me = self


@pytest.mark.parametrize("block", [gc_control.paused, gc_control.importing])
def test_the_collector_runs_again_and_finds_the_users_cycles(block):
    cycle = Cycle()
    with block():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc_control.resume()
    assert gc.get_freeze_count() <= gc_control.OF_PYTHON
    alive = weakref.ref(cycle)
    del cycle
    gc.collect()
    assert alive() is None


def test_what_is_there_at_the_start_is_looked_through_from_the_first_program_on():
    with gc_control.importing():
        pass
    assert gc.get_freeze_count() > 10 * gc_control.OF_PYTHON + 1000
    assert (torch.arange(7.0, device="tpu") * 0.314159)[0].item() == 0
    assert gc.get_freeze_count() <= gc_control.OF_PYTHON


@pytest.mark.parametrize("block", [gc_control.paused, gc_control.importing])
def test_what_the_user_has_switched_off_or_frozen_stays_so(block):
    gc.disable()
    with pytest.raises(ValueError), block():
        raise ValueError
    assert not gc.isenabled()
    gc.enable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with block():
        pass
    gc_control.resume()
    assert frozen - 100 < gc.get_freeze_count() <= frozen


def test_what_the_user_freezes_after_the_start_stays_so():
    with gc_control.importing():
        pass
    mine = [Cycle() for _ in range(1000)]
    gc.freeze()
    gc_control.resume()
    assert gc.get_freeze_count() > len(mine)


def test_nothing_is_collected_while_a_program_is_traced(monkeypatch: pytest.MonkeyPatch):
    seen = []
    as_function = segments.as_function

    def spy(segment: segments.Segment) -> Any:
        run, avals = as_function(segment)

        def traced(*arguments: Any) -> Any:
            seen.append(gc.isenabled())
            return run(*arguments)

        return traced, avals

    monkeypatch.setattr(segments, "as_function", spy)
    x = torch.arange(5.0, device="tpu") ** 0.271828
    torch.tpu.synchronize()
    assert seen and not any(seen) and gc.isenabled()
    assert x[1].item() == 1
