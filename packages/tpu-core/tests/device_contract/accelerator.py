"""Rows A: torch.accelerator, the module that does not name a kind of device."""

from __future__ import annotations

import gc

import pytest
import torch

from .process import run_python

MIB = 1 << 20


def check_accelerator_device_count() -> None:
    assert torch.accelerator.device_count() == torch.tpu.device_count() >= 1


def check_accelerator_is_available() -> None:
    assert torch.accelerator.is_available() is True
    code = """
        import torch
        assert isinstance(torch.accelerator.is_available(), bool)
        assert isinstance(torch.tpu.is_available(), bool)
        assert not torch.tpu.is_initialized()
    """
    assert run_python(code, "-W", "error") == ""
    # A platform that is asked for and not there is an error at first use, not here.
    assert run_python(code, "-W", "error", TPU_PLATFORM="tpu") == ""


def check_accelerator_current_device() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("tpu")
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("tpu")
    assert torch.accelerator.current_device_index() == 0
    torch.accelerator.set_device_index(0)
    torch.accelerator.set_device_index("tpu:0")
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_device_index() == 0
    with torch.accelerator.device_index(None):
        pass
    with pytest.raises(ValueError, match="cpu"):
        torch.accelerator.set_device_index("cpu")
    run_python(
        """
        import torch
        torch.accelerator.set_device_index(1)
        assert torch.accelerator.current_device_index() == 1
        assert torch.tpu.current_device() == 1
        assert torch.ones(1, device="tpu").device.index == 1
        with torch.accelerator.device_index(0):
            assert torch.accelerator.current_device_index() == 0
        assert torch.accelerator.current_device_index() == 1
        """,
        TPU_PLATFORM="cpu",
        TPU_NUM_DEVICES="2",
    )


def check_accelerator_streams() -> None:
    current = torch.accelerator.current_stream()
    assert current.device == torch.device("tpu", 0)
    side = torch.Stream(device="tpu")
    start = torch.Event(device="tpu", enable_timing=True)
    end = torch.Event(device="tpu", enable_timing=True)
    x = torch.ones(64, 64, device="tpu")
    start.record()
    side.wait_stream(current)
    with side:
        y = x @ x
        end.record(side)
    current.wait_event(end)
    current.wait_stream(side)
    assert (y + 1)[0, 0].item() == 65
    end.synchronize()
    assert start.query()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    side.synchronize()
    assert side.query()
    recorded = side.record_event()
    recorded.wait(current)
    torch.accelerator.set_stream(side)
    try:
        assert torch.accelerator.current_stream() == side
    finally:
        torch.accelerator.set_stream(current)
    x.record_stream(side)


def check_accelerator_synchronize() -> None:
    x = torch.ones(128, 128, device="tpu")
    for _ in range(4):
        x = (x @ x).clamp(max=1)
    torch.accelerator.synchronize()
    event = torch.Event(device="tpu")
    event.record()
    torch.accelerator.synchronize("tpu:0")
    torch.accelerator.synchronize(torch.device("tpu"))
    assert event.query()
    run_python(
        """
        import torch
        try:
            x = torch.ones(1 << 22, device="tpu") + 1
            torch.accelerator.synchronize()
        except torch.OutOfMemoryError as error:
            assert "memory" in str(error), error
        else:
            raise AssertionError("32 MiB fit into a limit of 4")
        """,
        TPU_PLATFORM="cpu",
        TPU_MEMORY_LIMIT="4M",
    )


def check_accelerator_memory() -> None:
    accelerator = torch.accelerator
    held = torch.zeros(1, device="tpu")
    accelerator.synchronize()
    gc.collect()
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    x = torch.arange(2 * MIB, dtype=torch.float32, device="tpu")
    accelerator.synchronize()
    during = accelerator.memory_allocated()
    assert during - before >= 8 * MIB
    assert accelerator.max_memory_allocated() >= during
    assert accelerator.memory_reserved() >= during
    assert accelerator.max_memory_reserved() >= accelerator.memory_reserved()
    del x
    accelerator.synchronize()
    gc.collect()
    assert accelerator.memory_allocated() - before < MIB
    assert accelerator.max_memory_allocated() >= during
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() < during

    stats = accelerator.memory_stats()
    for key in (
        "allocated_bytes.all.current",
        "allocated_bytes.all.peak",
        "active_bytes.all.peak",
        "reserved_bytes.all.peak",
        "num_alloc_retries",
        "num_ooms",
    ):
        assert stats[key] >= 0, key
    assert stats["allocated_bytes.all.current"] == accelerator.memory_allocated()
    assert torch.tpu.memory_stats()["active_bytes.all.peak"] == stats["active_bytes.all.peak"]
    assert torch.tpu.memory_allocated() == accelerator.memory_allocated()
    accelerator.reset_accumulated_memory_stats()
    assert accelerator.memory_stats()["allocated_bytes.all.freed"] == 0

    free, total = accelerator.get_memory_info()
    assert 0 < free <= total
    assert torch.tpu.mem_get_info()[1] == total
    accelerator.empty_cache()
    torch.tpu.empty_cache()
    assert held.item() == 0


def check_accelerator_capability() -> None:
    dtypes = torch.accelerator.get_device_capability()["supported_dtypes"]
    assert {
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    } <= set(dtypes)


def check_accelerator_empty_host_cache() -> None:
    pinned = torch.ones(1024).pin_memory()
    del pinned
    if hasattr(torch.accelerator, "empty_host_cache"):  # torch 2.11 has no such function
        torch.accelerator.empty_host_cache()
    assert torch.ones(4).pin_memory().tolist() == [1.0] * 4


def check_accelerator_graphs() -> None:
    assert not torch.tpu.is_current_stream_capturing()
    if not hasattr(torch.accelerator, "Graph"):  # torch 2.11
        return
    x = torch.zeros(3, device="tpu")
    graph = torch.accelerator.Graph()
    with torch.Stream(), graph:
        assert torch.tpu.is_current_stream_capturing()
        x += 1
        y = x * 2
    assert x.tolist() == [0, 0, 0]
    for i in (1, 2):
        graph.replay()
        assert (x.tolist(), y.tolist()) == ([i] * 3, [2 * i] * 3)
