"""Registering costs nothing, and picks backends as the user would."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.distributed.distributed_c10d import Backend, BackendConfig

import spawn

exec(spawn.REGISTER)


def test_registering_imports_nothing() -> None:
    code = f"{spawn.REGISTER}\nimport sys; heavy = 'jax', 'tpu_distributed.backend', "
    code += "'tpu_distributed._C'; print([m for m in heavy if m in sys.modules])"
    command = [sys.executable, "-c", code]
    printed = subprocess.run(
        command, env=spawn.environment(), capture_output=True, text=True, check=True, timeout=100
    ).stdout
    assert printed.strip() == "[]"


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("undefined", "tpu:tpu,cpu:gloo"),
        ("tpu", "tpu:tpu,cpu:gloo"),
        ("tpu_dist", "tpu:tpu_dist,cpu:gloo"),
        ("tpu:tpu", "tpu:tpu"),
        ("cpu:gloo,tpu:tpu_dist", "cpu:gloo,tpu:tpu_dist"),
        ("gloo", "cpu:gloo,cuda:gloo"),
    ],
)
def test_backends_by_name(asked: str, given: str) -> None:
    assert repr(BackendConfig(Backend(asked))) == given


def test_the_device_has_a_default() -> None:
    assert Backend.default_device_backend_map["tpu"] == "tpu"
