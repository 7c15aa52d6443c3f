"""Ops of other libraries that have a CPU kernel alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tpu_core import extend

KEPT: list[Tensor] = []


def kept(x: Tensor) -> Tensor:
    KEPT.append(x)
    return x + 1


def slope(x: Tensor) -> Tensor:
    x.requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad((x * x).sum(), x)[0]


def refused(x: Tensor) -> Tensor:
    raise ValueError("no such thing")


def incremented(x: Tensor) -> None:
    x.add_(1)


KERNELS: dict[str, Callable[..., Any]] = {
    "neg(Tensor x) -> Tensor": lambda x: x.neg(),
    "two(Tensor x, Tensor? y, int k=2) -> (Tensor, Tensor)": lambda x, y, k=2: (
        x * k,
        x if y is None else x + y,
    ),
    "each(Tensor[] x) -> Tensor[]": lambda x: [t * 2 for t in x],
    "total(Tensor x) -> int": lambda x: int(x.sum()),
    "same(Tensor x) -> Tensor": lambda x: x,
    "rest(Tensor x) -> Tensor": lambda x: x[1:],
    "increment(Tensor(a!) x) -> ()": incremented,
    "keep(Tensor x) -> Tensor": kept,
    "slope(Tensor x) -> Tensor": slope,
    "refuse(Tensor x) -> Tensor": refused,
}


CALLED: list[Tensor] = []


def only_for_devices(x: Tensor, dim: int = 9) -> Tensor:
    """A kernel that refuses the CPU as such, as those of `tpu_kernels.jax_op` do without ``cpu=``:
    what is tested is that the device does not take this for an error of the user's call.
    """
    CALLED.append(x)
    raise NotImplementedError("this op is for devices")


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    made = torch.library.Library("tpu_test_library", "DEF")
    for schema, kernel in KERNELS.items():
        made.define(schema)
        made.impl(schema.split("(")[0], kernel, "CPU")
    made.define("lowered(Tensor self, int dim=9) -> Tensor")
    made.impl("lowered", only_for_devices, "CPU")
    made.impl("lowered", lambda x, dim=9: torch.empty_like(x), "Meta")
    extend.register("tpu_test_library.lowered.default", lambda x, dim=9: x * dim)
    extend.record_op("tpu_test_library::lowered")
    yield
    KEPT.clear()


pytestmark = [
    pytest.mark.usefixtures("every_tier"),
    pytest.mark.filterwarnings("ignore::tpu_core.errors.FallbackWarning"),
]
ops = torch.ops.tpu_test_library


def test_results() -> None:
    x = torch.arange(4.0)
    d = x.to("tpu")
    for other in (None, x):
        want = ops.two(x, other, k=3)
        got = ops.two(d, None if other is None else d, k=3)
        for w, g in zip(want, got, strict=True):
            torch.testing.assert_close(g.cpu(), w if other is not None else w.clone())
    for w, g in zip(ops.each([x, x + 1]), ops.each([d, d + 1]), strict=True):
        torch.testing.assert_close(g.cpu(), w)
    assert ops.total(d) == ops.total(x) == 6
    assert ops.neg(d.view(2, 2).t()).tolist() == ops.neg(x.view(2, 2).t()).tolist()


def test_written_arguments() -> None:
    x = torch.zeros(4, device="tpu")
    twin = x.clone()
    ops.increment(x)
    ops.increment(x[1:3])
    assert x.tolist() == [1, 2, 2, 1]
    assert twin.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("op", ["same", "rest"])
def test_results_are_new_memory(op: str) -> None:
    x = torch.arange(4.0, device="tpu")
    getattr(ops, op)(x).zero_()
    assert x.tolist() == [0, 1, 2, 3]


def test_an_argument_that_the_kernel_keeps() -> None:
    x = torch.arange(3.0, device="tpu")
    y = ops.keep(x)
    x.add_(10)
    assert (x.tolist(), y.tolist()) == ([10, 11, 12], [1, 2, 3])
    KEPT.pop().zero_()
    assert (x.tolist(), y.tolist()) == ([10, 11, 12], [1, 2, 3])


def test_derivatives_inside() -> None:
    x = torch.arange(3.0, device="tpu")
    for _ in range(2):
        assert ops.slope(x).tolist() == [0, 2, 4]
    assert not x.requires_grad


def test_errors() -> None:
    with pytest.raises(ValueError, match="no such thing"):
        ops.refuse(torch.ones(2, device="tpu"))


def test_the_host_tier_copies_nothing(host: None) -> None:
    x = torch.ones(3, device="tpu")
    before = torch.tpu.metrics()["fallbacks"]
    assert ops.neg(x).tolist() == [-1, -1, -1]
    assert torch.tpu.metrics()["fallbacks"] == before


def test_an_op_with_a_lowering_is_not_tried_on_the_cpu() -> None:
    # 9 is no dim of a vector, which would be a reason to ask the CPU's kernel of an ATen op.
    assert ops.lowered(torch.ones(2, device="tpu")).tolist() == [9, 9]
    assert ops.lowered(torch.ones(2, device="tpu"), 3).tolist() == [3, 3]
    assert not CALLED
