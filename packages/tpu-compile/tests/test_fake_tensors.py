"""Fake tensors on the device: outside of their mode, with its dispatch switched off, and where a
compiled function reads what has no value yet.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._mode_utils import no_dispatch

import tpu_core


def made() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2, device="tpu")


def converted() -> torch.Tensor:
    return FakeTensorMode().from_tensor(torch.ones(2, device="tpu"))


@pytest.mark.parametrize("make", [made, converted])
def test_they_are_printed_and_copied_outside_of_their_mode(
    make: Callable[[], torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    fake = make()
    print(fake, [fake], f"{fake}")
    assert capsys.readouterr().out.count("FakeTensor(..., device='tpu:0', size=(2,))") == 3
    assert copy.deepcopy(fake).device.type == "tpu"
    assert fake.cpu().device.type == "cpu"


READS: list[Callable[[torch.Tensor], Any]] = [
    torch.Tensor.cpu,
    torch.Tensor.zero_,
    torch.Tensor.clone,
    lambda t: t + 1,
    lambda t: torch.ones(2).copy_(t),
    lambda t: torch.ones(2, device="tpu").copy_(t),
]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("make", [made, converted])
def test_what_reads_their_memory_raises(
    make: Callable[[], torch.Tensor], read: Callable[[torch.Tensor], Any]
) -> None:
    fake = make()
    with (
        no_dispatch(),
        pytest.raises(RuntimeError, match="memory of a fake tensor was read or written"),
    ):
        read(fake)


# What reads a tensor's memory or its address, by what PyTorch makes of it on the CPU.
TRACED: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda x: torch.from_numpy(x.numpy() * 2),
    "asarray": lambda x: torch.as_tensor(np.asarray(x) * 2),
    "int": lambda x: x[: int(x[0])] * 2,
}
BREAKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tolist": lambda x: x * x.tolist()[0],
    "data_ptr": lambda x: x + x.data_ptr() % 2,
    "storage": lambda x: x * x.untyped_storage().nbytes(),
    "byte": lambda x: x * x.untyped_storage()[0],
    "copy": lambda x: copy.deepcopy(x) + 1,
}


@pytest.mark.parametrize("name", [*TRACED, *BREAKS])
def test_compiled_reads_of_memory_are_traced_or_break_the_graph_as_on_the_cpu(name: str) -> None:
    f = {**TRACED, **BREAKS}[name]
    backends = {"cpu": "aot_eager", "tpu": "tpu"}
    whole: dict[str, Any] = {}
    for device, backend in backends.items():
        torch._dynamo.reset()
        x = torch.ones(3, device=device)
        torch.testing.assert_close(torch.compile(f, backend=backend)(x).cpu(), f(x.cpu()))
        torch._dynamo.reset()
        try:
            torch.compile(f, backend=backend, fullgraph=True)(x)
        except Exception as error:
            whole[device] = type(error), str(error).partition("Developer debug context")[0]
        else:
            whole[device] = None
    assert whole["tpu"] == whole["cpu"]
    assert (whole["tpu"] is None) == (name in TRACED)


@torch._dynamo.allow_in_graph
def opaque(x: torch.Tensor) -> torch.Tensor:
    return tpu_core.from_jax(tpu_core.to_jax(x) + 1)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_an_opaque_function_that_reads_memory_is_named_with_its_line(fullgraph: bool) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return opaque(x)  # the line at fault

    with pytest.raises(RuntimeError) as error:
        torch.compile(step, fullgraph=fullgraph)(torch.ones(3, device="tpu"))
    for part in ("memory of a fake tensor", "torch.library.custom_op", "# the line at fault"):
        assert part in str(error.value)


def test_jax_arrays_in_a_compiled_function() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return tpu_core.from_jax(tpu_core.to_jax(x * 2) + 1) * 2

    x = torch.ones(3, device="tpu")
    assert torch.compile(step)(x).tolist() == [6.0] * 3
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="tpu_kernels.jax_op"):
        torch.compile(step, fullgraph=True)(x)


def _channels_last(device: str, *shape: int) -> torch.Tensor:
    x = torch.randn(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    on_device = torch.empty_strided(x.size(), x.stride(), device=device)
    return on_device.copy_(x).requires_grad_()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_lie_as_those_of_the_cpu(dims: int, dynamic: bool) -> None:
    def rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = getattr(F, f"conv{dims}d")(x, weight)
        return y if dims == 1 else y.movedim(1, -1).view(-1, 6)  # an error with other strides

    compiled = torch.compile(rows, dynamic=dynamic)
    for batch in (2, 4):
        results = []
        for device, function in (("cpu", rows), ("tpu", compiled)):
            torch.manual_seed(batch)
            x = _channels_last(device, batch, 4, *[5, 6, 7][:dims])
            weight = torch.randn(6, 4, *[2] * dims).to(device).requires_grad_()
            y = function(x, weight)
            gradients = torch.autograd.grad(y.square().sum(), [x, weight])
            results.append([t.detach() for t in (y, *gradients)])
        for expected, result in zip(*results):
            assert result.stride() == expected.stride()
            torch.testing.assert_close(result.cpu(), expected, rtol=1e-4, atol=1e-3)
