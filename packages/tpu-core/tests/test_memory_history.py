"""History of device memory: snapshots that PyTorch's tools read, the peak by line, summaries."""

from __future__ import annotations

import json
import pickle
import sys
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.cuda import _memory_viz

from tpu_core import memory_history, modes
from tpu_core.config import override

MIB = 1 << 20
PROGRAMS = modes.Mode("programs", max_ops=0)


@pytest.fixture(autouse=True)
def recording() -> Iterator[None]:
    torch.tpu.synchronize()
    torch.tpu.memory._record_memory_history()
    yield
    torch.tpu.memory._record_memory_history(enabled=None)


@pytest.fixture(params=["kernels", "programs"])
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    """CPU kernels, or programs of whole segments."""
    if request.param == "kernels":
        request.getfixturevalue("host")
        yield request.param
        return
    with modes.using(PROGRAMS):
        yield request.param


def line_here() -> int:
    # A variable for the frame would be a cycle that keeps the test's tensors until a collection.
    return sys._getframe(1).f_lineno


def entries(snapshot: dict[str, Any], action: str) -> list[dict[str, Any]]:
    return [e for e in snapshot["device_traces"][0] if e["action"] == action]


def users_line(frames: list[dict[str, Any]]) -> int | None:
    return next((f["line"] for f in frames if f["filename"] == __file__), None)


def test_the_largest_allocation_has_the_users_line(tier: str) -> None:
    x = torch.ones(256, 256).to("tpu")
    large, line = torch.cat([x] * 16), line_here()
    torch.tpu.synchronize()
    snapshot = torch.tpu.memory._snapshot()
    biggest = max(entries(snapshot, "alloc"), key=lambda e: e["size"])
    assert biggest["size"] == large.nbytes and users_line(biggest["frames"]) == line
    segment = max(snapshot["segments"], key=lambda s: s["total_size"])
    assert segment["address"] == biggest["addr"] and segment["total_size"] == large.nbytes
    assert users_line(segment["blocks"][0]["frames"]) == line
    assert not any("tpu_core/device" in f["filename"] for f in biggest["frames"])
    del large
    freed = max(entries(torch.tpu.memory._snapshot(), "free_completed"), key=lambda e: e["size"])
    assert freed["addr"] == biggest["addr"] and users_line(freed["frames"])


def test_segments_are_all_that_is_allocated(tier: str) -> None:
    kept = [torch.rand(n, 100, device="tpu") for n in (1, 20, 300)]
    kept[1].mul_(2)
    torch.tpu.synchronize()
    segments = torch.tpu.memory_snapshot()
    assert sum(s["total_size"] for s in segments) == torch.tpu.memory_allocated()


def test_gradients_carry_the_line_of_the_forward(tier: str) -> None:
    x, w = (torch.ones(300, 300, device="tpu") for _ in range(2))
    w.requires_grad_()
    y, line = x @ w, line_here()
    y.sum().backward()
    torch.tpu.synchronize()
    found = [
        s["frames"]
        for s in torch.tpu.memory_snapshot()
        if s["frames"] and s["frames"][0]["name"].endswith("(gradient)")
    ]
    assert [frames[0]["line"] for frames in found] == [line]
    assert w.grad is not None


def test_temporaries_and_donations_of_a_program() -> None:
    weight = torch.ones(MIB, device="tpu")
    with modes.using(PROGRAMS):
        product = torch.arange(512.0 * 512, device="tpu").view(512, 512)
        # XLA counts no temporaries inside a fusion, and fuses no sort; jaxlib 0.11 fuses products.
        weight.mul_((product @ product).sort().values.sum())
        torch.tpu.synchronize()
    snapshot = torch.tpu.memory._snapshot()
    taken = [e for e in entries(snapshot, "alloc") if "user_metadata" in e]
    assert taken and all("temporaries of a program" in e["user_metadata"] for e in taken)
    assert max(e["size"] for e in taken) >= product.nbytes
    assert taken[0]["frames"][0]["filename"] == "<XLA program>"
    assert users_line(taken[0]["frames"])
    ended = {e["addr"] for e in entries(snapshot, "free_completed")}
    assert all(e["addr"] in ended for e in taken)
    donated = [e for e in entries(snapshot, "free_completed") if "user_metadata" in e]
    assert [e["size"] for e in donated] == [weight.nbytes]
    assert donated[0]["user_metadata"] == "donated to a program"


def plotted(page: str) -> dict[str, Any]:
    """The snapshot inside a page of memory_viz."""
    files = json.loads(page.split("local_files = ", 1)[1].split("\n", 1)[0])
    return pickle.loads(b64decode(files[0]["base64"]))


@pytest.mark.skipif(
    not hasattr(torch.accelerator.memory, "_snapshot"), reason="torch 2.11 has none"
)
def test_the_snapshot_of_torch_accelerator() -> None:
    kept = torch.ones(MIB, device="tpu") + 1
    torch.tpu.synchronize()
    snapshot = torch.accelerator.memory._snapshot()
    assert kept.nbytes in [e["size"] for e in entries(snapshot, "alloc")]
    assert snapshot["segments"] == torch.tpu.memory._snapshot()["segments"]


def test_pytorchs_tools_read_a_dump(tmp_path: Path) -> None:
    base = torch.ones(1000, device="tpu")
    torch.tpu.synchronize()
    torch.tpu.memory._record_memory_history(clear_history=True)
    kept = torch.cat([base[:1].expand(3 * MIB)] * 2)
    for _ in range(3):
        x = base * 2
        torch.tpu.synchronize()
        del x
    file = tmp_path / "memory.pickle"
    torch.tpu.memory._dump_snapshot(file)
    snapshot = pickle.loads(file.read_bytes())
    summary = _memory_viz.segsum(snapshot)
    assert "[aa] 24.0MiB allocated" in summary and "total_free: 0.0B" in summary
    trace = _memory_viz.trace(snapshot)
    assert "cudaMalloc" in trace and trace.count("[0:3.9KiB]") == 3 and trace.count("del ") == 3
    assert "'action': 'snapshot'" in trace
    for page in (
        _memory_viz.trace_plot(snapshot),
        _memory_viz.trace_plot(snapshot, plot_segments=True),
        _memory_viz.segment_plot(snapshot),
    ):
        assert plotted(page) == snapshot
    flames = _memory_viz.memory(snapshot, format_flamegraph=lambda text: text)
    assert f"test_pytorchs_tools_read_a_dump {kept.nbytes}" in flames
    left = _memory_viz.filter_alloc_free_pairs(snapshot)
    assert [e["size"] for e in entries(left, "alloc")] == [kept.nbytes]


def test_the_peak_by_line(tier: str) -> None:
    torch.tpu.synchronize()
    before = torch.tpu.memory_allocated()
    kept = torch.ones(MIB, device="tpu")
    torch.tpu.synchronize()
    first = torch.ones(2 * MIB, device="tpu")
    line = line_here() - 1
    torch.tpu.synchronize()
    del first
    later = torch.ones(MIB, device="tpu")
    torch.tpu.synchronize()
    (peak,) = memory_history.peaks()
    assert peak.nbytes == before + 12 * MIB
    assert sum(row.nbytes for row in peak.rows) == peak.nbytes
    assert (peak.rows[0].nbytes, peak.rows[0].count) == (8 * MIB, 1)
    assert f"test_memory_history.py:{line} in" in (peak.rows[0].line or "")
    report = torch.tpu.compile_report()
    assert f"test_memory_history.py:{line} in" in str(report) and "Peak memory of tpu:0" in str(
        report
    )
    assert "Peak memory of tpu:0" in report.to_html() and f":{line}" in report.to_html()
    del kept, later


def test_the_summary_names_what_is_live(tier: str) -> None:
    model = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 7)).to("tpu")
    optimizer = torch.optim.Adam(model.parameters())
    out = model(torch.ones(50, 300, device="tpu"))
    out.sum().backward()
    optimizer.step()
    other = torch.ones(400, 400, device="tpu")
    torch.tpu.synchronize()
    other.add_(1)  # recorded, where programs run: the memory is what it was
    text = torch.tpu.memory_summary()
    for name in (
        "Sequential.0.weight",
        "gradient of Sequential.0.weight",
        "exp_avg of Sequential.0",
    ):
        assert name in text
    assert (
        "float32[400, 400]" in text and "parameters" in text and "test_memory_history.py:" in text
    )
    assert "parameters" not in torch.tpu.memory_summary(abbreviated=True)


def test_out_of_memory_is_an_event() -> None:
    with (
        override(memory_limit=torch.tpu.memory_allocated() + MIB),
        pytest.raises(torch.OutOfMemoryError),
    ):
        torch.empty(MIB, device="tpu")
    (event,) = entries(torch.tpu.memory._snapshot(), "oom")
    assert event["size"] == 4 * MIB and event["device_free"] <= MIB and users_line(event["frames"])


def test_what_is_kept_follows_the_arguments() -> None:
    record, snapshot = torch.tpu.memory._record_memory_history, torch.tpu.memory._snapshot

    def made() -> list[dict[str, Any]]:
        for _ in range(5):
            x = torch.ones(100, device="tpu")
            torch.tpu.synchronize()
            del x
        return snapshot()["device_traces"][0]

    record(enabled=None)
    assert not snapshot()["segments"] and not made()
    kept = torch.ones(10, device="tpu")
    record("state")
    assert not made()
    assert kept.nbytes in [s["total_size"] for s in snapshot()["segments"]]
    record(max_entries=3, clear_history=True)
    made()
    assert len(memory_history._C.memory_history()[0]) == 3
    record(context=None, clear_history=True)
    assert all(not e["frames"] for e in made())
    record(context="alloc", clear_history=True)
    trace = made()
    assert all(
        bool(e["frames"]) == ("alloc" in e["action"]) for e in trace if e["action"] != "snapshot"
    )
    record(clear_history=True, skip_actions=["segment_alloc", "segment_free", "snapshot"])
    assert {e["action"] for e in made()} == {"alloc", "free_requested", "free_completed"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"enabled": "some"}, ValueError),
        ({"context": "some"}, ValueError),
        ({"stacks": "cpp"}, ValueError),
        ({"skip_actions": ["wait"]}, ValueError),
        ({"max_entries": -1}, ValueError),
        ({"compile_context": True}, NotImplementedError),
        ({"global_record_annotations": True}, NotImplementedError),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        torch.tpu.memory._record_memory_history(**arguments)


def test_statistics_as_a_tree() -> None:
    stats = torch.tpu.memory_stats()
    tree = torch.tpu.memory_stats_as_nested_dict()
    assert tree["num_ooms"] == stats["num_ooms"]
    assert set(tree["allocated_bytes"]["all"]) == {"current", "peak", "allocated", "freed"}
