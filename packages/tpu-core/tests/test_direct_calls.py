"""Calls that go straight to a CPU kernel, and copies that become a device tensor's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from tpu_core import modes
from tpu_core.metrics import METRICS

pytestmark = pytest.mark.usefixtures("every_tier")


@pytest.fixture(autouse=True)
def segments(every_tier: None) -> Iterator[None]:
    with modes.using("segments"):
        yield


def written(operation: Callable[[torch.Tensor], Any]) -> Callable[[str], Any]:
    """What a matrix and a clone of it hold after an operation that may be refused, three times."""

    def run(device: str) -> Any:
        x = torch.arange(9.0).view(3, 3).to(device)
        found = []
        for _ in range(3):
            clone = x.clone()
            try:
                operation(x)
            except RuntimeError as error:
                found.append(str(error).splitlines()[0])
            found += [x.cpu().clone(), clone.cpu()]
        return found

    return run


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda x: x.add_(x),
    "a view of itself": lambda x: x.mul_(x[0].clone()),
    "by way of its transpose": lambda x: x.t().mul_(2).sub_(x.t()),
    "a part of itself": lambda x: x[1:].add_(x[:-1]),
    "a row of itself": lambda x: x.add_(x[0]),
    "a window": lambda x: x[1:, :2].copy_(x[:2, 1:].clone()),
    "one element": lambda x: x[1].fill_(7),
    "a list with one tensor twice": lambda x: torch._foreach_add_([x, x], 1.0),
    "a list with a view": lambda x: torch._foreach_mul_([x[0], x[1]], [x[2], x[2]]),
    "an integer from a float": lambda x: x.int().add_(1.5),
    "shapes that do not fit": lambda x: x.add_(torch.ones(2, device=x.device)),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes(name: str) -> None:
    run = written(WRITES[name])
    for ours, theirs in zip(run("tpu"), run("cpu"), strict=True):
        if isinstance(theirs, str):
            assert ours == theirs
        else:
            assert_close(ours, theirs)


def test_memory_that_a_refused_op_was_to_write_reads_as_zeros() -> None:
    x = torch.empty(4, device="tpu")
    with pytest.raises(RuntimeError):
        x.fill_(1j)
    assert torch.equal(x.cpu(), torch.zeros(4))


def test_cpu_autocast_leaves_the_device_alone() -> None:
    a, b = torch.randn(4, 4, device="tpu"), torch.randn(4, 4, device="tpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [a @ b, F.linear(a, b), F.conv1d(a[None], b[None])]
    assert {t.dtype for t in found} == {torch.float32}


def test_an_empty_tensor_is_no_allocation() -> None:
    def count() -> int:
        return torch.tpu.memory_stats()["allocation.all.current"]

    before = count()
    for _ in range(5):
        x = torch.empty(0, 3, device="tpu")
    assert count() == before
    del x
    assert count() == before


def test_copies_are_of_the_geometry_and_the_bytes_at_the_time() -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    parts = (base.mT, base[:, 1], base[..., ::2], base[0, 0, 1], base[:1].expand(4, 3, 4), last)
    for part in parts:
        for dtype in (torch.float32, torch.float64, torch.int32):
            there = part.to("tpu", dtype)
            # As from the CPU to another device, so not by `to`, which keeps what needs no copy.
            expected = torch.ops.aten._to_copy(part, dtype=dtype)
            assert there.stride() == expected.stride()
            back = there.cpu()
            assert back.stride() == expected.stride()
            assert torch.equal(back, expected)
    source = torch.ones(3)
    there = source.to("tpu")
    source.zero_()
    back = there.cpu()
    there.add_(1)
    assert back.tolist() == [1.0] * 3
    assert there.tolist() == [2.0] * 3


def test_inference_tensors() -> None:
    def run(device: str) -> list[torch.Tensor]:
        with torch.inference_mode():
            x = torch.ones(2, 2, device=device)
            x.add_(1)
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            x.add_(1)
        y = x.clone()
        y.add_(1)
        return [x.cpu(), y.cpu()]

    for ours, theirs in zip(run("tpu"), run("cpu"), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shift", [0, 1])
def test_windows_that_move_are_ops_of_one_segment(
    shift: int, request: pytest.FixtureRequest
) -> None:
    data = torch.randn(40, 4)
    ours, before = data.to("tpu"), METRICS.snapshot()
    for step in range(12):
        start = shift * step
        total = (ours[start : start + 5] * 2 + ours[start + 1 : start + 6]).relu().sum().item()
        theirs = (data[start : start + 5] * 2 + data[start + 1 : start + 6]).relu().sum()
        assert_close(torch.tensor(total), theirs)
    made = METRICS.delta(before)
    if "restless" in request.node.callspec.id:
        assert made["executions"] >= 6
    assert made["compiles"] <= 2


def comparable(device: str) -> list[torch.Tensor]:
    x = torch.tensor([1.0, float("nan"), 3.0]).to(device)
    counted = torch.arange(3).to(device)
    square = torch.arange(9.0).view(3, 3).to(device)
    z = torch.tensor([1 + 2j, 3 - 1j, 0j]).to(device)
    ones = torch.ones(3, device=device)
    large = torch.full((3,), 2**53 + 1, device=device)
    return [
        *(x, x.clone(), x[1:], counted, counted.float(), counted.half(), counted.bool()),
        *(z, z.conj(), z.conj().clone(), z.imag, z.conj().imag, z.imag.neg()),
        *(square, square.t(), square.t().contiguous(), ones, ones[:1].expand(3), ones[0]),
        *(large, large.double(), ones[:0], ones.clone().requires_grad_()),
    ]


def test_equal() -> None:
    ours, theirs = comparable("tpu"), comparable("cpu")
    for i in range(len(ours)):
        found = [torch.equal(ours[i], t) for t in ours]
        assert found == [torch.equal(theirs[i], t) for t in theirs], i


def selected(device: str) -> list[torch.Tensor]:
    x = torch.linspace(-2, 2, 24).view(4, 6).to(device).requires_grad_()
    found = []
    for i in range(8):
        y = (x * (i % 3 + 1)).tanh() + 0.5
        places = (y > 0).nonzero()  # no program has it: the host runs it between two
        kept = y[y > 0.2].square()
        (gradient,) = torch.autograd.grad(kept.sum(), x)
        last = torch.arange(i, i + 4, device=device) * places[:4, 1]
        found += [places.cpu(), kept.detach().cpu(), gradient.cpu(), last.cpu()]
    return found


def test_ops_that_no_program_has_between_programs() -> None:
    for ours, theirs in zip(selected("tpu"), selected("cpu"), strict=True):
        assert_close(ours, theirs)
