"""Fake tensors on the device, outside of their mode and with its dispatch switched off."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._mode_utils import no_dispatch


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
    with no_dispatch(), pytest.raises(RuntimeError, match="was not allocated by tpu_core"):
        read(fake)
