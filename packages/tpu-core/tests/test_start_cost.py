"""What starting the device does to the process's garbage collector: nothing that stays."""

from __future__ import annotations

import gc
import weakref

import pytest

from tpu_core.runtime import _collector_paused


@pytest.fixture(autouse=True)
def collector():
    yield
    gc.unfreeze()
    gc.enable()


class Cycle:
    def __init__(self):
        self.me = self


def test_the_collector_runs_again_and_finds_the_users_cycles():
    cycle = Cycle()
    with _collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    alive = weakref.ref(cycle)
    del cycle
    gc.collect()
    assert alive() is None


def test_what_the_user_has_switched_off_or_frozen_stays_so():
    gc.disable()
    with pytest.raises(ValueError), _collector_paused():
        raise ValueError
    assert not gc.isenabled()
    gc.enable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with _collector_paused():
        pass
    assert frozen - 100 < gc.get_freeze_count() <= frozen
