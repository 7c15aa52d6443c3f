"""Calls of compiled graphs past PyTorch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tpu_compile import backend
from tpu_core import _C


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each call that was left to the dispatcher."""
    made: list[str] = []
    list_caller = _C.list_caller

    def watched(name: str, others: tuple[Any, ...], general: Callable[..., Any]) -> Any:
        def counted(tensors: list[torch.Tensor]) -> Any:
            made.append(name)
            return general(tensors)

        return list_caller(name, others, counted)

    monkeypatch.setattr(_C, "list_caller", watched)
    return made


def test_training_with_an_input_that_has_no_gradient(left):
    def loss(x: torch.Tensor, w: torch.Tensor, n: int) -> torch.Tensor:
        return (torch.tanh(x @ w) * n).sum()

    compiled = torch.compile(loss, fullgraph=True)
    x, w = torch.randn(3, 4), torch.randn(4, 2, requires_grad=True)
    there, v = x.to("tpu"), w.detach().to("tpu").requires_grad_()
    for call in range(3):
        (expected,) = torch.autograd.grad(loss(x, w, 2), w)
        (found,) = torch.autograd.grad(compiled(there, v, 2), v)
        torch.testing.assert_close(found.cpu(), expected)
        if call == 0:
            left.clear()  # PyTorch looks at the first call in a mode of its own
    assert left == []


def test_a_mode_sees_the_graph(left):
    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

    compiled = torch.compile(lambda x: torch.sin(x) + 1, fullgraph=True)
    x = torch.ones(3, device="tpu")
    expected = compiled(x).cpu()
    left.clear()
    with Seen():
        found = compiled(x)
    torch.testing.assert_close(found.cpu(), expected)
    assert seen == ["tpu_compile.graph.default"]
    assert left == ["tpu_compile::graph"]


def test_a_function_outlives_a_reset(left):
    x = torch.ones(3)
    call = backend.tpu(torch.fx.symbolic_trace(lambda x: (torch.cos(x) * 3,)), [x.to("tpu")])
    for _ in range(2):
        torch.compiler.reset()
        with torch.no_grad():
            (found,) = call(x.to("tpu"))
        torch.testing.assert_close(found.cpu(), torch.cos(x) * 3)
    assert left == ["tpu_compile::graph"]
