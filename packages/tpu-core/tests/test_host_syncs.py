"""The warning about lines that read from the device in nearly every step."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from tpu_core import host_syncs, modes
from tpu_core.config import override
from tpu_core.errors import HostSyncWarning
from tpu_core.host_syncs import READS, HostSyncs

STEPS = 3 * READS


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was seen or said before the test."""
    monkeypatch.setattr(host_syncs, "SYNCS", HostSyncs())


def warned(work: Callable[[], object]) -> list[tuple[str, str]]:
    """Source and message of each line that was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    found = [w for w in caught if issubclass(w.category, HostSyncWarning)]
    return [(linecache.getline(w.filename, w.lineno).strip(), str(w.message)) for w in found]


def training() -> Iterator[torch.Tensor]:
    """The loss of each step."""
    weight = torch.ones(4, device="tpu", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.01)
    for _ in range(STEPS):
        loss = (weight * weight).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def test_a_loss_that_is_read_in_each_step():
    def work():
        for loss in training():
            loss.item()

    ((line, message),) = warned(work)
    assert line == "loss.item()"
    assert "read by: item(), float(), bool() or a use as a number" in message
    assert f"reads: the last {READS} in {READS} optimizer steps" in message
    assert "total += loss.detach()" in message


def test_each_line_is_named_once():
    def work():
        for loss in training():
            float(loss)
            if (loss * 2) > 100:
                raise AssertionError
            loss[None][loss[None] > 0]

    found = warned(work) + warned(work)
    assert [line for line, _ in found] == [
        "float(loss)",
        "if (loss * 2) > 100:",
        "loss[None][loss[None] > 0]",
    ]
    assert "torch.where(mask, x, 0)" in found[2][1]
    assert "total +=" not in found[2][1]


def test_a_loss_that_is_read_every_tenth_step():
    def work():
        for step, loss in enumerate(training()):
            if step % 10 == 0:
                loss.item()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_syncs, "READS", 3)  # as after many more steps
        assert warned(work) == []


def test_reading_results_that_are_there_is_no_loop_of_waits():
    def work():
        losses = list(training())
        for loss in losses:
            loss.item()
        for _ in range(STEPS):
            losses[0].item()

    assert warned(work) == []


def test_a_read_that_leaves_the_device_its_work(monkeypatch: pytest.MonkeyPatch):
    # The loss of the step before: what runs meanwhile is not done when it has been read.
    monkeypatch.setattr(host_syncs.HostSyncs, "_is_idle", lambda self, array: False)

    def work():
        for loss in training():
            loss.item()

    assert warned(work) == []


def test_reads_without_an_optimizer_where_segments_are_fused():
    x = torch.ones(5).to("tpu")

    def work():
        with modes.using(modes.Mode("whole", max_ops=0)):
            for _ in range(STEPS):
                (x * 3).sum().item()

    ((line, message),) = warned(work)
    assert line == "(x * 3).sum().item()"
    assert "reads: the last 20 in 20 programs run" in message


def test_compiles_begin_the_count_anew(monkeypatch: pytest.MonkeyPatch):
    def work():
        for i, loss in enumerate(training()):
            loss.item()
            if i % 10 == 0:
                torch.zeros([2] * (i // 10 + 1), device="tpu").sum().cpu()

    assert warned(work) == []


def test_silenced_by_the_configuration_and_where_each_op_is_waited_for():
    def work():
        for loss in training():
            loss.item()

    with override(performance_warnings=False):
        assert warned(work) == []
    with modes.using(modes.Mode("waiting", max_ops=1, wait=True)):
        assert warned(work) == []


@pytest.fixture
def sync_debug():
    yield torch.tpu.set_sync_debug_mode
    torch.tpu.set_sync_debug_mode("default")


def test_reads_that_sync_debug_mode_refuses(sync_debug) -> None:
    x = torch.arange(6.0).to("tpu")
    sync_debug("error")
    assert torch.tpu.get_sync_debug_mode() == 2
    reads = {
        r"item\(\)": lambda: x.sum().item(),
        "use as a number": lambda: bool((x > 0).any()),
        r"cpu\(\)": lambda: (x + 1).cpu(),
        "boolean mask": lambda: x[x > 2],
        "nonzero": lambda: x.nonzero(),
    }
    for what, read in reads.items():
        with pytest.raises(
            RuntimeError, match=f"synchronizing TPU operation: .*{what}.*{__name__}"
        ):
            read()
    y = (x * 2).sqrt_()  # nothing is read
    sync_debug("default")
    assert y[2].item() == 2.0 and x[x > 2].tolist() == [3.0, 4.0, 5.0]


def test_reads_that_sync_debug_mode_warns_of(sync_debug) -> None:
    x = torch.arange(6.0).to("tpu")
    sync_debug(1)
    with pytest.warns(UserWarning, match="called a synchronizing TPU operation") as caught:
        assert x.sum().item() == 15
    assert caught[0].filename == __file__
    with pytest.raises(RuntimeError, match="expected one of `default`, `warn`, `error`"):
        sync_debug("loud")
    assert torch.tpu.get_sync_debug_mode() == 1
