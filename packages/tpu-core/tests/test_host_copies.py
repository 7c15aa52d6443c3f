"""Copies to pinned memory overlap what the device does next, and are there once it was waited
for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import jax
import pytest
import torch

from tpu_core import modes
from tpu_core.errors import ExecutionError
from tpu_core.host_copies import HOST_COPIES
from tpu_core.pjrt import client as pjrt

# Its memory is not the device's then, and copies to it wait (GetCPUAllocatorMaybePinned in
# aten/src/ATen/EmptyTensor.cpp).
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="PyTorch pins memory for CUDA where it can"
)
WHOLE = modes.Mode("whole", max_ops=0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Copies under way end once it is set."""
    opened = threading.Event()
    fetch = pjrt.fetch

    def fetch_later(array: jax.Array) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            assert opened.wait(60)
        return fetch(array)

    monkeypatch.setattr(pjrt, "fetch", fetch_later)
    yield opened
    opened.set()
    HOST_COPIES.finish()


def pinned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, -1, dtype=dtype, pin_memory=True)


def test_the_host_goes_on_and_an_event_says_when_the_copy_is_there(gate: threading.Event) -> None:
    x = torch.arange(6.0).to("tpu") * 2
    host, event, later = pinned(6), torch.tpu.Event(), torch.tpu.Event()
    side = torch.tpu.Stream()
    side.wait_stream(torch.tpu.current_stream())
    with torch.tpu.stream(side):
        later.record()  # before the copy: does not wait for it
        host.copy_(x, non_blocking=True)
        event.record()
    y = (x + 1).sum()
    assert y.item() == 36  # the device is not held up
    assert later.query()
    assert not event.query()
    assert not side.query()
    assert host.tolist() == [-1] * 6
    gate.set()
    event.synchronize()
    assert host.tolist() == [0, 2, 4, 6, 8, 10]
    assert event.query()
    assert side.query()


@pytest.mark.parametrize("wait", ["device", "stream"])
def test_synchronising_waits_for_the_copy(gate: threading.Event, wait: str) -> None:
    host = pinned(3)
    host.copy_(torch.ones(3, device="tpu"), non_blocking=True)
    threading.Timer(0.1, gate.set).start()
    if wait == "device":
        torch.tpu.synchronize()
    else:
        torch.tpu.current_stream().synchronize()
    assert host.tolist() == [1, 1, 1]


def test_later_writes_and_donations_leave_what_is_copied_alone(gate: threading.Event) -> None:
    with modes.using(WHOLE):
        x = torch.arange(4.0).to("tpu") + 1
        host = pinned(4)
        host.copy_(x, non_blocking=True)
        for _ in range(3):
            x.mul_(2)
            torch.tpu.Event().record()
        assert x.tolist() == [8, 16, 24, 32]
    gate.set()
    torch.tpu.synchronize()
    assert host.tolist() == [1, 2, 3, 4]


def test_views_and_dtypes(gate: threading.Event) -> None:
    gate.set()
    x = torch.arange(12.0).view(3, 4)
    device = x.to("tpu")
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[1:, ::2], lambda t: t[1, 1]):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            expected = view(x).to(dtype)
            host = pinned(2, *expected.shape, dtype=dtype)
            host[1].copy_(view(device), non_blocking=True)
            torch.tpu.synchronize()
            assert torch.equal(host[1], expected)
            assert (host[0] == -1).all()


def test_a_copy_back_to_the_device_waits_for_the_copy_to_the_host(gate: threading.Event) -> None:
    host = pinned(3)
    host.copy_(torch.ones(3, device="tpu"), non_blocking=True)
    threading.Timer(0.1, gate.set).start()
    assert host.to("tpu", non_blocking=True).tolist() == [1, 1, 1]


def test_memory_that_is_not_pinned_is_written_at_once(gate: threading.Event) -> None:
    host = torch.empty(3)
    host.copy_(torch.ones(3, device="tpu"), non_blocking=True)
    assert host.tolist() == [1, 1, 1]
    assert torch.ones(3, device="tpu").to("cpu", non_blocking=True).tolist() == [1, 1, 1]


def test_autograd_sees_the_write_when_it_is_called(gate: threading.Event) -> None:
    host = pinned(3)
    version = host._version
    host.copy_(torch.ones(3, device="tpu"), non_blocking=True)
    assert host._version == version + 1
    gate.set()
    torch.tpu.synchronize()
    assert host._version == version + 1


def test_what_could_not_be_computed_is_raised_where_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(array: object) -> torch.Tensor:
        raise RuntimeError("INTERNAL: the device is gone")

    monkeypatch.setattr(pjrt, "fetch", fail)
    host, event = pinned(3), torch.tpu.Event()
    host.copy_(torch.ones(3, device="tpu"), non_blocking=True)
    event.record()
    with pytest.raises(ExecutionError, match="the device is gone"):
        event.synchronize()
    with pytest.raises(ExecutionError, match="the device is gone"):
        torch.tpu.synchronize()
    torch.tpu.synchronize()  # it is said once


def test_the_interpreter_ends_with_copies_under_way() -> None:
    script = """
        import torch
        x = torch.ones(1 << 20, device="tpu")
        for _ in range(20):
            host = torch.empty(1 << 20, pin_memory=True)
            host.copy_(x * 2, non_blocking=True)
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
