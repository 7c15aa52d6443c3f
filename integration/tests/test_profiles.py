"""Profiles of a training step of a GPT: device time covered, named, and summed by ATen op."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from models.gpt import GPT

BOTH = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]


class Training:
    """Steps of a small GPT on a device."""

    def __init__(self, device: str, compiled: bool = False) -> None:
        torch.manual_seed(0)
        model = GPT(vocab=256, length=64, layers=2, dim=256, heads=4).to(device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model: Any = torch.compile(model) if compiled else model
        self.ids = torch.randint(0, 256, (4, 64)).to(device)

    def step(self) -> float:
        self.optimizer.zero_grad()
        logits = self.model(self.ids)
        loss = F.cross_entropy(logits.flatten(0, 1), self.ids.flatten())
        loss.backward()
        self.optimizer.step()
        return loss.item()


def profiled(training: Training, folder: Path) -> tuple[profile, list[dict[str, Any]]]:
    """A step whose programs the operating system did not interrupt, or the last of ten.

    Returns:
        The profile, and the events of its trace.
    """
    for _ in range(3):
        training.step()
    for _ in range(10):
        with profile(activities=BOTH) as taken:
            training.step()
        taken.export_chrome_trace(str(folder / "trace.json"))
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
        ops = [e for e in events if e.get("cat") == "kernel"]
        if covered(ops) > 0.9 * covered(ops + programs_of(events)):
            break
    return taken, events


def programs_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in events if e.get("cat") == "gpu_user_annotation"]


def covered(rows: list[dict[str, Any]]) -> float:
    """Time in which one of the rows is there."""
    total = end = 0.0
    for row in sorted(rows, key=lambda row: float(row["ts"])):
        total += max(row["ts"] + row["dur"] - max(end, row["ts"]), 0)
        end = max(end, row["ts"] + row["dur"])
    return total


def assert_covered_and_named(events: list[dict[str, Any]]) -> None:
    ops = [e for e in events if e.get("cat") == "kernel"]
    device_time = covered(ops + programs_of(events))
    named = [e for e in ops if ".py:" in e["name"] and e["args"]["op"].startswith("aten::")]
    assert covered(ops) > 0.9 * device_time
    assert covered(named) > 0.95 * covered(ops)
    # Arrows lead from rows of the host to those of the device.
    shown = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_user_annotation")]
    starts: dict[tuple[int, int], list[float]] = {}
    for row in shown:
        starts.setdefault((row["pid"], row["tid"]), []).append(row["ts"])
    ends = [e for e in events if e.get("cat") == "ac2g" and e["ph"] == "f"]
    for end in ends:  # times are rounded to nanoseconds
        assert min(abs(ts - end["ts"]) for ts in starts[end["pid"], end["tid"]]) < 0.01
    assert ends
    assert {e["id"] for e in ends} == {
        e["id"] for e in events if e.get("cat") == "ac2g" and e["ph"] == "s"
    }


def counts(taken: profile) -> dict[str, int]:
    """Number of calls of matrix products and softmaxes on the host's side."""
    names = {f"aten::{n}" for n in ("addmm", "mm", "gelu", "native_layer_norm", "_log_softmax")}
    return {a.key: a.count for a in taken.key_averages() if a.key in names}


def test_device_rows_of_a_training_step(tmp_path: Path) -> None:
    taken, events = profiled(Training("tpu"), tmp_path)
    assert_covered_and_named(events)
    on_cpu = Training("cpu")
    with profile(activities=[ProfilerActivity.CPU]) as expected:
        on_cpu.step()
    assert counts(taken) == counts(expected)
    # Device time by ATen op is that of the device's rows.
    averages = [a for a in taken.key_averages() if a.key.startswith("aten::") and "(" not in a.key]
    by_op = {a.key: a.self_device_time_total for a in averages}
    assert all(by_op[key] > 0 for key in ("aten::addmm", "aten::mm", "aten::gelu"))


def test_device_rows_of_a_compiled_training_step(tmp_path: Path) -> None:
    taken, events = profiled(Training("tpu", compiled=True), tmp_path)
    assert_covered_and_named(events)
    keys = {a.key.split(" ")[0] for a in taken.key_averages() if "gpt.py:" in a.key}
    assert {"aten::addmm", "aten::mm", "aten::gelu"} <= keys
