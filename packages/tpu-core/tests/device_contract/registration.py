"""Rows R: registration, and X: other processes and the default device."""

from __future__ import annotations

import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from .process import run_python


def check_name() -> None:
    assert torch._C._get_privateuse1_backend_name() == "tpu"
    assert torch.device("tpu").type == "tpu"
    assert torch.device("tpu:0").index == 0
    assert str(torch.ones(1, device="tpu").device) == "tpu:0"
    activity = torch.profiler.ProfilerActivity
    assert activity.TPU == activity.PrivateUse1
    with pytest.raises(RuntimeError, match="backend"):
        torch.utils.rename_privateuse1_backend("other")


def check_module() -> None:
    import torch.tpu as imported

    assert imported is torch.tpu
    assert sys.modules["torch.tpu"] is torch.tpu
    assert torch.get_device_module("tpu") is torch.tpu
    assert torch.get_device_module() is torch.tpu
    with pytest.raises(AttributeError, match="no_such_function"):
        torch.tpu.no_such_function  # noqa: B018
    listed = dir(torch.tpu)
    assert {*torch.tpu.__all__, "eager_mode"} <= set(listed)
    assert not [n for n in listed if n.startswith("_") or not hasattr(torch.tpu, n)]
    assert not {"functools", "install", "Any", "EntryPoint", "entry_points"} & set(listed)


def check_methods() -> None:
    x = torch.arange(3.0)
    assert not x.is_tpu
    on_device = x.tpu()
    assert on_device.is_tpu
    assert on_device.device == torch.device("tpu", 0)
    assert on_device.tpu() is on_device
    assert torch.equal(on_device.cpu(), x)
    module = torch.nn.Linear(2, 2).tpu()
    assert all(p.is_tpu and isinstance(p, torch.nn.Parameter) for p in module.parameters())
    storage = x.untyped_storage()
    assert not storage.is_tpu
    assert storage.tpu().device.type == "tpu"
    packed = pack_sequence([torch.ones(3), torch.ones(2)]).tpu()
    assert packed.is_tpu
    assert packed.data.is_tpu


def check_autoload() -> None:
    report = """
        import sys, torch
        assert hasattr(torch, "tpu"), "torch.tpu is not there"
        early = [m for m in sys.modules if m.split(".")[0] in ("jax", "jaxlib", "libtpu")]
        assert not early, early
        assert "torch._dynamo" not in sys.modules
    """
    assert run_python(report, "-W", "error") == ""
    off = 'import torch; assert not hasattr(torch, "tpu"); torch.ones(1)'
    assert run_python(off, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == ""


def check_hooks() -> None:
    x, y = torch.zeros(8, device="tpu"), torch.zeros(8, device="tpu")
    assert 0 != x.data_ptr() != y.data_ptr() != 0
    assert x[2:].data_ptr() == x.data_ptr() + 2 * x.element_size()
    storage = x.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(8 * 4)
    x.fill_(3.0)
    assert x.tolist() == [3.0] * 8
    x.resize_(2, 8)
    assert x[0].tolist() == [3.0] * 8
    assert torch.UntypedStorage(16, device="tpu").device == torch.device("tpu", 0)
    assert torch.accelerator.device_count() == torch.tpu.device_count()
    assert torch.Generator(device="tpu").device == torch.device("tpu", 0)
    assert torch.empty(4, pin_memory=True).is_pinned()


def check_guard() -> None:
    run_python(
        """
        import torch
        assert torch.accelerator.device_count() == 2
        x = torch.arange(3.0, device="tpu:1")
        y = x + 1
        assert y.device == torch.device("tpu", 1), y.device
        assert torch.tpu.current_device() == 0
        with torch.accelerator.device_index(1):
            assert torch.empty(1, device="tpu").device.index == 1
        assert torch.empty(1, device="tpu").device.index == 0
        assert y.to("tpu:0").device.index == 0
        assert y.to("tpu:0").tolist() == [1.0, 2.0, 3.0]
        x.requires_grad_()
        (x * x).sum().backward()
        assert x.grad.device.index == 1
        for a, b in ((x, torch.ones(3, device="tpu:0")), (x, torch.ones(3))):
            try:
                a + b
            except RuntimeError as error:
                assert "same device" in str(error), error
            else:
                raise AssertionError("operands on two devices were added")
        torch.accelerator.synchronize("tpu:1")
        """,
        TPU_PLATFORM="cpu",
        TPU_NUM_DEVICES="2",
    )
    with pytest.raises(RuntimeError):
        torch.empty(1, device=f"tpu:{torch.tpu.device_count()}")


def check_other_processes() -> None:
    with pytest.raises(RuntimeError, match="CPU"):
        ForkingPickler.dumps(torch.ones(2, device="tpu"))
    run_python(
        """
        import os, torch
        torch.ones(2, device="tpu").sum().item()
        child = os.fork()
        if child == 0:
            try:
                torch.ones(2, device="tpu").sum().item()
            except RuntimeError as error:
                os._exit(0 if "fork" in str(error) and torch.tpu._is_in_bad_fork() else 3)
            os._exit(4)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        assert torch.ones(2, device="tpu").sum().item() == 2
        """
    )


def check_default_device() -> None:
    def constructed() -> dict[str, torch.Tensor]:
        return {
            "empty": torch.empty(2),
            "empty_strided": torch.empty_strided((2, 2), (1, 2)),
            "zeros": torch.zeros(2),
            "ones": torch.ones(2),
            "full": torch.full((2,), 3.0),
            "arange": torch.arange(4),
            "linspace": torch.linspace(0, 1, 3),
            "logspace": torch.logspace(0, 1, 3),
            "eye": torch.eye(2),
            "rand": torch.rand(2),
            "randn": torch.randn(2),
            "randint": torch.randint(3, (2,)),
            "randperm": torch.randperm(4),
            "tril_indices": torch.tril_indices(2, 2),
            "triu_indices": torch.triu_indices(2, 2),
            "hann_window": torch.hann_window(4),
            "hamming_window": torch.hamming_window(4),
            "blackman_window": torch.blackman_window(4),
            "kaiser_window": torch.kaiser_window(4),
            "fftfreq": torch.fft.fftfreq(4),
            "tensor": torch.tensor([1, 2]),
            "as_tensor": torch.as_tensor([1.0]),
            "asarray": torch.asarray([1.0]),
            "scalar_tensor": torch.scalar_tensor(2.0),
            "parameter": torch.nn.Linear(2, 2).weight,
        }

    with torch.device("tpu"):
        elsewhere = {k: v.device for k, v in constructed().items() if not v.is_tpu}
        assert not elsewhere
        assert torch.ones(1, device="cpu").device.type == "cpu"
    assert torch.ones(1).device.type == "cpu"
    torch.set_default_device("tpu")
    try:
        elsewhere = {k: v.device for k, v in constructed().items() if not v.is_tpu}
        assert not elsewhere
        assert torch.get_default_device() == torch.device("tpu", 0)
    finally:
        torch.set_default_device(None)
