"""DLPack: tensors of the device in NumPy, JAX and PyTorch's CPU tensors."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.complex64),
    *(torch.uint8, torch.int16, torch.int64, torch.bool),
)


def values(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(12).reshape(3, 4).to(dtype)


@pytest.mark.of_cpu(reason="NumPy reads memory of the host")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("copy", (None, True, False))
def test_numpy(dtype: torch.dtype, copy: bool | None) -> None:
    host = values(dtype)
    for of in (
        lambda t: t,
        lambda t: t[1:, ::2],
        lambda t: t.T,
        lambda t: t[:0],
        lambda t: t[1, 1],
    ):
        array = np.from_dlpack(of(host.to("tpu")), copy=copy)
        assert np.array_equal(array, of(host).numpy()) and array.dtype == host.numpy().dtype


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int32), ids=str)
def test_jax(dtype: torch.dtype) -> None:
    array = jax.dlpack.from_dlpack(values(dtype).to("tpu"))
    assert str(array.dtype) == str(dtype).removeprefix("torch.")
    assert np.asarray(array.astype("float32")).tolist() == values(torch.float32).tolist()


def test_torch() -> None:
    t = values(torch.float32).to("tpu")
    for found in (torch.from_dlpack(t), torch.from_dlpack(t, device="cpu", copy=True)):
        assert found.device.type == "cpu" and torch.equal(found, values(torch.float32))
        found.zero_()
        assert torch.equal(t.cpu(), values(torch.float32))
    capsule = torch.utils.dlpack.to_dlpack(t)  # the capsule's device is the tensor's
    assert torch.utils.dlpack.from_dlpack(capsule).device == t.device


@pytest.mark.of_cpu(reason="NumPy reads memory of the host")
def test_what_is_shared_is_read_only_and_stays_as_it_is() -> None:
    t = torch.ones(1000, device="tpu")
    other = t.clone()
    shared, again = np.from_dlpack(t, copy=False), np.from_dlpack(t, copy=False)
    assert shared.ctypes.data == again.ctypes.data and not shared.flags.writeable
    copied = np.from_dlpack(t)
    copied[:] = 5
    t.add_(1)
    assert t.sum().item() == 2000 and other.sum().item() == 1000
    assert shared.sum() == 1000
    del t, other
    torch.randn(1000, device="tpu").sum().item()
    assert shared.sum() == 1000


@pytest.mark.of_cpu(reason="NumPy reads memory of the host")
def test_a_result_that_is_not_there_yet_is_waited_for() -> None:
    x = torch.randn(700, 700)
    product = x.to("tpu") @ x.to("tpu")
    assert np.allclose(np.from_dlpack(product, copy=False), (x @ x).numpy(), atol=1e-2)


@pytest.mark.of_cpu(reason="other platforms export to their device")
def test_what_cannot_be_exported() -> None:
    with pytest.raises(BufferError, match="require gradient"):
        np.from_dlpack(torch.ones(2, device="tpu", requires_grad=True))
    with pytest.raises(BufferError, match="conjugate"):
        np.from_dlpack(torch.ones(2, device="tpu", dtype=torch.complex64).conj())
    with pytest.raises(BufferError, match=r"to \(2, 0\)"):
        torch.ones(2, device="tpu").__dlpack__(dl_device=(2, 0))


def test_tensors_of_the_cpu_are_pytorchs() -> None:
    host = torch.ones(3)
    np.from_dlpack(host)[:] = 4
    assert host.tolist() == [4.0] * 3
    assert host.__dlpack_device__() == (1, 0)
