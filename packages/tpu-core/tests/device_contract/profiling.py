"""Rows P: the profiler."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def check_profiler() -> None:
    x = torch.ones(8, 8, device="tpu")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.TPU]) as taken:
        (x @ x).sum().item()
    (mm,) = [
        a
        for a in taken.key_averages()
        if a.key == "aten::mm" and a.device_type == DeviceType.CPU and a.self_device_time_total
    ]
    rows = [e for e in taken.events() if e.device_type == DeviceType.PrivateUse1]
    assert mm.self_device_time_total > 0 and any(e.name.startswith("aten::mm (") for e in rows)


def check_profiler_files(tmp_path: Path) -> None:
    import torch.tpu.profiler as imported

    with imported.trace(tmp_path) as taken:
        torch.ones(8, device="tpu").sum().item()
    assert taken.xplane.exists() and taken.perfetto.exists()
