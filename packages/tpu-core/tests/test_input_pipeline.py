"""The warning where the device waits for the DataLoader."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tpu_core import input_pipeline
from tpu_core.config import override
from tpu_core.errors import InputPipelineWarning
from tpu_core.input_pipeline import BATCHES, InputPipeline, Measurement


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.zeros((), device="tpu").item()  # starts the device, which wraps the iterators
    monkeypatch.setattr(input_pipeline, "PIPELINE", InputPipeline())


class Slow(Dataset[torch.Tensor]):
    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(0.03)
        return torch.ones(4)

    def __len__(self) -> int:
        return 3 * BATCHES


def messages(work: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    found = [w for w in caught if issubclass(w.category, InputPipelineWarning)]
    assert all(w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


def train() -> None:
    total = torch.zeros((), device="tpu")
    for batch in DataLoader(Slow()):
        total += batch.to("tpu").sum()
        torch.tpu.synchronize()


def test_a_slow_loader_is_named_once():
    (message,) = messages(lambda: (train(), train()))
    assert "The device waits for the DataLoader " in message
    assert f"over {BATCHES} batches" in message
    assert "num_workers: 0" in message
    assert "num_workers=4" in message


def test_silenced_by_the_configuration():
    with override(performance_warnings=False):
        assert messages(train) == []


def test_iterating_leaves_the_device_alone():
    before = torch.tpu.metrics()
    assert [int(x.sum()) for x in DataLoader(torch.ones(50, 3))] == [3] * 50
    after = torch.tpu.metrics()
    assert after["executions"] == before["executions"]
    assert after["host_syncs"] == before["host_syncs"]


def measured(entered: float, left: float, idle: float | None) -> float | None:
    """The verdict of batches 10 s apart, each asked for, given, and the device idle at these
    times.
    """
    m = Measurement(programs=7, made=3)
    for i in range(BATCHES):
        start = i * 10.0
        m.add(start, start + entered, start + left, None if idle is None else start + idle)
        m.seconds += 10 - left  # the step
    return m.verdict(programs=7 + BATCHES, made=3)


def test_only_the_time_in_which_the_device_was_idle_counts():
    assert measured(2.0, 8.0, idle=1.0) == pytest.approx(0.6)  # idle before the loader was asked
    assert measured(2.0, 8.0, idle=5.0) == pytest.approx(0.3)  # done meanwhile
    assert measured(2.0, 8.0, idle=9.0) is None  # after the batch was there
    assert measured(2.0, 8.0, idle=None) is None  # still busy
    assert measured(2.0, 3.0, idle=1.0) is None  # a tenth: not worth a word


@pytest.mark.parametrize(
    ("programs", "made", "seconds"),
    [(BATCHES, 1, 1.0), (3, 0, 1.0), (BATCHES, 0, 1e-4)],
    ids=["a compile", "next to no program was run", "a toy"],
)
def test_what_says_nothing_about_the_loader(programs: int, made: int, seconds: float):
    m = Measurement(0, 0)
    for i in range(BATCHES):
        m.add(i * seconds, i * seconds, (i + 1) * seconds, i * seconds)
    assert m.verdict(programs, made) is None
    assert (m.verdict(BATCHES, 0) == 1.0) is (seconds == 1.0)
