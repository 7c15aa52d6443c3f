"""Calls of an op of a list of tensors past the dispatcher, and what is left to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tpu_core import _C

NUMBERS = [1.0, 2.0, 3.0]
add = torch.ops.aten._foreach_add.ScalarList


def caller(numbers: Sequence[float] = NUMBERS) -> tuple[Callable[[Any], Any], list[int]]:
    """A caller of the op, and the lengths of the lists that it left to PyTorch."""
    left: list[int] = []

    def general(tensors: list[torch.Tensor]) -> Any:
        left.append(len(tensors))
        return add(tensors, numbers)

    return _C.list_caller("aten::_foreach_add.ScalarList", (numbers,), general), left


def tensors(device: str = "tpu") -> list[torch.Tensor]:
    return [torch.arange(3.0).to(device) * k for k in range(1, 4)]


def same(made: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    expected = add([t.detach().cpu() for t in given], NUMBERS)
    torch.testing.assert_close([t.detach().cpu() for t in made], expected)


@pytest.mark.parametrize("kind", [list, tuple])
def test_values_and_references(kind):
    call, left = caller()
    given = tensors()
    before = [sys.getrefcount(t) for t in given]
    for _ in range(3):
        made = call(kind(given))
        assert isinstance(made, list)
        same(made, given)
    del made
    assert [sys.getrefcount(t) for t in given] == before
    assert left == []


def test_operands_of_all_kinds():
    call, left = caller()
    x, y, z = tensors()
    wide = torch.arange(12.0).view(3, 4).to("tpu")
    cases = [
        [x, x, y],
        [wide[0], wide[:, 1], wide.t()],
        [torch.empty(0, device="tpu"), x, z],
        [torch.nn.Parameter(x), y, z],
    ]
    with torch.no_grad():
        for given in cases:
            same(call(given), given)
            same(call(given), given)
    assert left == []


def test_results_are_tensors_of_their_own():
    call, _ = caller()
    given = tensors()
    made = call(given)
    with torch.inference_mode():
        assert call(given)[0].is_inference()
    for t in made:
        t.zero_()
        assert not t.requires_grad and not t.is_inference()
    torch.testing.assert_close([t.cpu() for t in given], tensors("cpu"))


def test_order_with_recorded_ops():
    call, left = caller()
    given = tensors()
    given[0].mul_(2)
    made = call(given)
    given[0].mul_(2)
    torch.testing.assert_close(made[0].cpu(), tensors("cpu")[0] * 2 + 1)
    assert left == []


def test_errors_are_those_of_the_op():
    call, left = caller([1.0, 2.0])
    given = tensors()
    before = [sys.getrefcount(t) for t in given]
    with pytest.raises(RuntimeError) as expected:
        add(tensors("cpu"), [1.0, 2.0])
    with pytest.raises(RuntimeError) as raised:
        call(given)
    assert str(raised.value).splitlines()[0] == str(expected.value).splitlines()[0]
    del raised
    assert [sys.getrefcount(t) for t in given] == before
    assert left == [3]  # PyTorch's own kernel raises


def test_gradients():
    call, left = caller()
    given = [t.requires_grad_() for t in tensors()]
    sum(t.sum() for t in call(given)).backward()
    assert left == [3]
    for t in given:
        torch.testing.assert_close(t.grad.cpu(), torch.ones(3))


class Subclass(torch.Tensor):
    pass


class SeenByDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class SeenByFunction(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "within", [SeenByDispatch, SeenByFunction, torch.autograd.profiler.profile]
)
def test_modes_and_profilers_see_the_op(within):
    call, left = caller()
    given = tensors()
    with within():
        made = call(given)
    same(made, given)
    same(call(given), given)
    assert left == [3]


def test_what_is_left_to_pytorch():
    call, left = caller()
    x, y, z = tensors()
    for given in ([x.as_subclass(Subclass), y, z], [torch._neg_view(x), y, z]):
        same(call(given), given)
    with pytest.raises(RuntimeError, match="same device"):
        call([x, y, torch.ones(3)])
    with pytest.raises(RuntimeError, match="Batching rule"):
        torch.vmap(lambda v: call([v, v, v])[0])(torch.ones(2, 3, device="tpu"))
    assert left == [3] * 4
