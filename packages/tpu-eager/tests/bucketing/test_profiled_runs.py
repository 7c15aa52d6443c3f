"""Rows of the device in torch.profiler for programs on padded arrays."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tpu_core import modes


@pytest.mark.of_cpu(reason="PyTorch's profiler holds CUPTI, which XLA's would need")
def test_programs_on_padded_arrays_have_ops_and_lines() -> None:
    def call(n: int) -> None:
        x = torch.ones(n, 16, device="tpu")
        torch.softmax(x @ x.t(), -1).sum().item()

    with modes.using("fused"):
        for n in (8, 9, 10):
            call(n)
        before = torch.tpu.metrics()["padded_executions"]
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as taken:
            call(11)
        assert torch.tpu.metrics()["padded_executions"] > before
    rows = [e.name for e in taken.events() if e.device_type == DeviceType.PrivateUse1]
    assert {"aten::mm", "aten::_softmax"} <= {name.split(" ")[0] for name in rows}
    lines = [name for name in rows if name.startswith("aten::mm")]
    assert lines and all("(test_profiled_runs.py:" in name for name in lines)
