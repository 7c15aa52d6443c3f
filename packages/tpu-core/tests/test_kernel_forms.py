"""The forms of schema whose kernels take their arguments as they are, called so and boxed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

aten = torch.ops.aten
A, B, C, MASK = "first", "second", "third", "mask"

# A function of PyTorch, which calls the kernel as it is; the overload, whose calls are boxed; the
# arguments of both.
CALLS: list[tuple[Callable[..., Any], Any, tuple[Any, ...]]] = [
    (torch.abs, aten.abs.default, (A,)),
    (torch.mul, aten.mul.Tensor, (A, B)),
    (torch.mul, aten.mul.Tensor, (A, 1.5)),
    (torch.lerp, aten.lerp.Tensor, (A, B, C)),
    (torch.lerp, aten.lerp.Scalar, (A, B, 0.25)),
    (torch.pow, aten.pow.Tensor_Scalar, (A, 2)),
    (torch.clamp, aten.clamp.default, (A, None, 0.5)),
    (F.linear, aten.linear.default, (A, B, None)),
    (torch._softmax, aten._softmax.default, (A, 1, False)),
    (torch.neg_, aten.neg_.default, (A,)),
    (torch.Tensor.mul_, aten.mul_.Tensor, (A, B)),
    (torch.Tensor.fill_, aten.fill_.Scalar, (A, 2)),
    (torch.Tensor.sub_, aten.sub_.Tensor, (A, B)),
    (torch.nonzero, aten.nonzero.default, (MASK,)),  # Python handles its calls
]


def operands(device: str) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    made = {name: torch.rand(3, 3, generator=g) for name in (A, B, C)}
    made[MASK] = made[A] > 0.5
    return {name: t.to(device) for name, t in made.items()}


def references(tensors: dict[str, torch.Tensor]) -> list[int]:
    return [sys.getrefcount(t) for t in tensors.values()]


@pytest.mark.parametrize("boxed", [False, True], ids=["unboxed", "boxed"])
@pytest.mark.parametrize("call", CALLS, ids=lambda c: str(c[1]))
def test_results_and_references(call, boxed):
    function, overload, arguments = call
    compute = overload if boxed else function
    here, there = operands("cpu"), operands("tpu")
    expected = compute(*(here.get(a, a) for a in arguments))
    before = references(there)
    result = compute(*(there.get(a, a) for a in arguments))
    in_place = result is there[arguments[0]]
    assert in_place == (expected is here[arguments[0]])
    torch.testing.assert_close(result.cpu(), expected)
    torch.testing.assert_close({name: there[name].cpu() for name in here}, here)
    del result
    assert references(there) == before


@pytest.mark.parametrize("boxed", [False, True], ids=["unboxed", "boxed"])
def test_a_wrong_shape_has_the_cpus_error_and_leaves_no_reference(boxed):
    multiply = aten.mm.default if boxed else torch.mm
    messages = []
    for device in ("cpu", "tpu"):
        x, y = torch.ones(2, 3, device=device), torch.ones(2, 3, device=device)
        before = sys.getrefcount(x)
        with pytest.raises(RuntimeError) as error:
            multiply(x, y)
        messages.append(str(error.value).splitlines()[0])
        del error
        assert sys.getrefcount(x) == before
    assert messages[0] == messages[1]
