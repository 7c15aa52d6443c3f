"""Rows D: device selection, properties and streams of torch.tpu; T: PyTorch's test harness."""

from __future__ import annotations

import unittest

import pytest
import torch

from .process import run_python


def check_device_selection() -> None:
    assert type(torch.tpu.current_device()) is int
    for device in (0, "tpu:0", "tpu", torch.device("tpu"), torch.device("tpu", 0)):
        torch.tpu.set_device(device)
        assert torch.tpu.current_device() == 0
    for device in (0, "tpu:0", torch.device("tpu", 0)):
        with torch.tpu.device(device):
            assert torch.tpu.current_device() == 0
    with torch.tpu.device_of(torch.ones(1, device="tpu")):
        assert torch.tpu.current_device() == 0
    with torch.tpu.device_of(torch.ones(1)):
        assert torch.tpu.current_device() == 0
    assert torch.tpu.get_device() == torch.device("tpu", 0)
    with pytest.raises((RuntimeError, ValueError), match=str(torch.tpu.device_count())):
        torch.tpu.set_device(torch.tpu.device_count())
    with pytest.raises((RuntimeError, ValueError), match="cpu"):
        torch.tpu.set_device("cpu")


def check_initialization() -> None:
    code = """
        import torch
        assert not torch.tpu.is_initialized() and not torch.tpu._initialized
        torch.tpu.device_count()
        torch.manual_seed(1)
        {use}
        assert torch.tpu.is_initialized() and torch.tpu._initialized
        torch.tpu.init()
    """
    run_python(code.format(use="torch.tpu.init()"))
    run_python(code.format(use='torch.ones(1, device="tpu").item()'))


def check_device_properties() -> None:
    name = torch.tpu.get_device_name()
    assert isinstance(name, str)
    assert name
    assert torch.tpu.get_device_name(0) == torch.tpu.get_device_name("tpu:0") == name
    properties = torch.tpu.get_device_properties(torch.device("tpu", 0))
    assert properties.name == name
    assert properties.total_memory == torch.accelerator.get_memory_info()[1]
    assert properties.multi_processor_count >= 1


def check_module_streams() -> None:
    assert issubclass(torch.tpu.Stream, torch.Stream)
    assert issubclass(torch.tpu.Event, torch.Event)
    default = torch.tpu.default_stream()
    assert torch.tpu.current_stream() == default
    assert torch.tpu.current_stream(0) == torch.tpu.current_stream("tpu:0") == default
    side = torch.tpu.Stream(priority=-1)
    assert side.device.type == "tpu"
    torch.tpu.Stream()
    torch.tpu.Stream(device=0)
    x = torch.full((4,), 2.0, device="tpu")
    side.wait_stream(torch.tpu.current_stream())
    with torch.tpu.stream(side):
        assert torch.tpu.current_stream() == side
        y = x * 3
        event = torch.tpu.Event()
        event.record()
    assert torch.tpu.current_stream() == default
    torch.tpu.current_stream().wait_event(event)
    assert y.tolist() == [6.0] * 4
    with torch.tpu.stream(None):
        assert torch.tpu.current_stream() == default
    torch.tpu.set_stream(side)
    assert torch.tpu.current_stream() == side
    torch.tpu.set_stream(default)
    assert torch.tpu.current_stream() == default
    timed = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True)
    for event in timed:
        event.record()
    torch.tpu.synchronize()
    assert timed[0].elapsed_time(timed[1]) >= 0


def check_module_synchronize() -> None:
    event = torch.tpu.Event()
    (torch.ones(64, 64, device="tpu") @ torch.ones(64, 64, device="tpu")).sum()
    event.record()
    for device in (None, 0, "tpu", "tpu:0", torch.device("tpu", 0)):
        torch.tpu.synchronize(device)
    assert event.query()


def check_probes() -> None:
    assert torch.tpu.is_bf16_supported() is True
    # CUDA's is a pair of numbers; programs test its presence and compare it.
    assert torch.tpu.get_device_capability() is not None
    assert torch.tpu.get_device_capability(0) == torch.tpu.get_device_capability("tpu:0")


def check_device_type_tests() -> None:
    from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_utils import TestCase

    ran: list[str] = []

    class TestHarness(TestCase):
        def test_device(self, device: str) -> None:
            ran.append(torch.ones(1, device=device).device.type)

        @ops([op for op in op_db if op.name == "add"], allowed_dtypes=(torch.float32,))
        def test_op(self, device: str, dtype: torch.dtype, op) -> None:
            sample = next(iter(op.sample_inputs(device, dtype)))
            ran.append(op(sample.input, *sample.args, **sample.kwargs).device.type)

    scope = {"TestHarness": TestHarness}
    instantiate_device_type_tests(TestHarness, scope, only_for="tpu")
    names = [name for name in scope if name != "TestHarness"]
    assert len(names) == 1, names
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(scope[names[0]])
    result = unittest.TestResult()
    suite.run(result)
    assert not result.errors and not result.failures, result.errors + result.failures
    assert ran == ["tpu", "tpu"]
