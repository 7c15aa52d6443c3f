"""Devices of a process that torchrun has started beside others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tpu_core.platforms import device_count, local_processes

CODE = """
import torch
x = torch.ones(2, device="tpu:2") * 3
y = x.to("tpu:0")
print(torch.tpu.device_count(), x.device, y.tolist())
from tpu_core.runtime import runtime
print(len(set(runtime().client.devices)))
"""


def test_count_is_that_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_processes() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert local_processes() == device_count() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert local_processes() == 1


def test_all_devices_are_the_own_one() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2"},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    ).stdout
    assert printed.splitlines() == ["4 tpu:2 [3.0, 3.0]", "1"]
