"""Limits of device memory that come and go, and what an error says of the memory that is there."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn as nn

from tpu_core import _C, modes
from tpu_core.config import override
from tpu_core.errors import OutOfMemoryError

MIB = 1 << 20
WHOLE = modes.Mode("whole", max_ops=0)
STRICT = modes.Mode("strict", max_ops=1)


@pytest.fixture(autouse=True)
def without_limits() -> Iterator[None]:
    gc.collect()  # so that what is allocated is what the test makes
    yield
    torch.tpu.set_per_process_memory_fraction(1.0)


def test_a_limit_ends_with_its_block(host: None) -> None:
    x = torch.ones(10, device="tpu")
    assert not _C.memory_is_checked()
    with override(memory_limit="1G"):
        assert _C.memory_is_checked()
        with override(fallback="warn"):
            y = x + 1
        assert _C.memory_is_checked()
    assert not _C.memory_is_checked()
    before = torch.tpu.metrics()["host_ops"]
    z = y * 2 + x  # reads what the block recorded
    x.add_(1)
    assert torch.tpu.metrics()["host_ops"] > before
    assert z.tolist() == [5] * 10 and x.tolist() == [2] * 10 and y.tolist() == [2] * 10


@pytest.mark.of_cpu(reason="memory is always checked elsewhere")
def test_limits_of_several_threads() -> None:
    entered, leave = threading.Event(), threading.Event()

    def limited() -> None:
        with override(memory_limit="1G"):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=limited)
    thread.start()
    assert entered.wait(60)
    with override(memory_limit="2G"):
        pass
    checked = _C.memory_is_checked()
    leave.set()
    thread.join()
    assert checked and not _C.memory_is_checked()


@pytest.mark.of_cpu(reason="memory is always checked elsewhere")
def test_a_fraction_of_the_memory() -> None:
    assert torch.tpu.get_per_process_memory_fraction() == 1.0
    with override(memory_limit="1G"):
        total = torch.tpu.mem_get_info()[1]
        torch.tpu.set_per_process_memory_fraction((torch.tpu.memory_allocated() + MIB) / total)
        assert torch.tpu.get_per_process_memory_fraction() < 1
        torch.empty(MIB // 8, device="tpu")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(MIB, device="tpu")
        assert isinstance(caught.value, torch.tpu.OutOfMemoryError)
        torch.tpu.set_per_process_memory_fraction(1.0)
        torch.empty(MIB, device="tpu")
    assert not _C.memory_is_checked()


@pytest.mark.parametrize(
    ("fraction", "error"),
    [(1, TypeError), ("0.5", TypeError), (1.5, ValueError), (-0.1, ValueError)],
)
def test_fractions_that_are_refused(fraction: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="fraction"):
        torch.tpu.set_per_process_memory_fraction(fraction)


@pytest.mark.parametrize("mode", [WHOLE, STRICT], ids=lambda m: m.name)
def test_the_error_says_what_is_live_and_what_would_free_it(mode: modes.Mode) -> None:
    gc.collect()  # tensors in the tracebacks of other tests' errors
    with modes.using(mode):
        model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)).to("tpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(2, 512, device="tpu")).sum().backward()
        for _ in range(2):  # momentum begins as the gradient, and shares its memory
            optimizer.step()
        kept = torch.ones(3 * MIB // 4, device="tpu")
        torch.tpu.synchronize()
        with (
            override(memory_limit=torch.tpu.memory_allocated() + MIB),
            pytest.raises(OutOfMemoryError) as caught,
        ):
            optimizer.step()  # what it writes is recorded, and still there
            (torch.ones(4096, 512, device="tpu") @ model[0].weight.t()).sum().item()
    error = caught.value
    text = str(error)
    for part in (
        " out of memory",  # libraries that halve batches look for it
        "parameters 1.0",
        "gradients 1.0",
        "optimizer state 1.0",
        "other tensors 3.0",
        f"3.00 MiB float32[{kept.numel()}]",
        "Sequential.0.weight",
        "optimizer.zero_grad() frees 1.0",
    ):
        assert part in text, part
    assert error.needed and error.limit and error.live
    assert error.needed + error.live > error.limit


def test_the_error_names_lines_inside_the_program() -> None:
    with (
        modes.using(WHOLE),
        override(memory_limit=torch.tpu.memory_allocated() + 3 * MIB),
        pytest.raises(OutOfMemoryError, match=r"test_memory_limits.py:\d+ in too_large"),
    ):

        def too_large() -> float:
            x = torch.arange(1024.0, device="tpu").expand(2048, 1024) + 1
            return (x @ x.t()).sum().item()

        too_large()


def test_the_first_step_of_adam_leaves_no_state_where_it_fails() -> None:
    """Also where only the step itself is what exceeds the limit."""
    with modes.using(WHOLE):
        model = nn.Linear(512, 512, bias=False).to("tpu")
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 512, device="tpu")).sum().backward()
        torch.tpu.synchronize()
        with override(memory_limit=torch.tpu.memory_allocated() + MIB):
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.step()
                torch.tpu.synchronize()
            assert not optimizer.state
        optimizer.step()
        (state,) = optimizer.state.values()
        assert state["step"].item() == 1 and state["exp_avg"].isfinite().all()
