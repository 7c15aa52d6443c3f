"""``x.data = y`` and ``x.set_(y)`` on inputs of a compiled function, as in eager on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import exc

Tensor = torch.Tensor


def assigned(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    x.data = y
    return x * w


def computed(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    before = x * w
    x.data = y * 2
    y.mul_(3)
    return x * 2 + before


def of_another_shape(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    x.data = y.view(-1)[1:3]
    return (x * w[:2]).sum()


def a_view_is_left_behind(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    view = x.view(-1)
    x.data = y
    return view * 2, x * w


def twice(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    x.data = w
    z = x + 1
    x.data = y
    return x * z


FUNCTIONS = (assigned, computed, of_another_shape, a_view_is_left_behind, twice)


def run(f: Callable[..., Any], device: str, trains: bool) -> list[Any]:
    """Results, arguments afterwards, gradients, and where arguments share memory."""
    x, w = (torch.tensor(v, device=device) for v in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]))
    # Not at the start of its storage.
    y = torch.arange(5.0, device=device)[1:4]
    if trains:
        x.requires_grad_()
        w.requires_grad_()
    before = x._version
    made = f(x, y, w)
    versions = x._version - before
    results = [made] if isinstance(made, Tensor) else list(made)
    grads = []
    if trains:
        sum(r.sum() for r in results).backward()
        grads = [x.grad, w.grad]
    y.add_(10)  # is seen in what shares its memory
    found: list[Any] = [*results, *grads, x, y, w]
    return [*(None if t is None else t.detach().cpu() for t in found), versions]


CASES = [(f, trains) for f in FUNCTIONS for trains in (False, True)]
CASES.remove((of_another_shape, True))  # see below


@pytest.mark.parametrize(("f", "trains"), CASES)
def test_data_of_an_input(f: Callable[..., Any], trains: bool) -> None:
    want = run(f, "cpu", trains)
    got = run(torch.compile(f, fullgraph=True), "tpu", trains)
    for a, b in zip(got, want, strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b)
        else:
            assert a == b


def written_too(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    x.data = y
    x.add_(1)
    return x * w


@pytest.mark.parametrize(("f", "trains"), [(of_another_shape, True), (written_too, False)])
def test_what_no_backend_of_aot_autograd_does(f: Callable[..., Any], trains: bool) -> None:
    for device, backend in (("cpu", "aot_eager"), ("tpu", "tpu")):
        torch._dynamo.reset()
        # Dynamo refuses it itself since torch 2.15.
        with pytest.raises((exc.BackendCompilerFailed, exc.Unsupported)):
            run(torch.compile(f, fullgraph=True, backend=backend), device, trains)


def test_a_size_that_varies() -> None:
    compiled = torch.compile(assigned, fullgraph=True, dynamic=True)
    for n in (4, 6, 9):
        here = [torch.arange(n) + k for k in range(3)]
        there = [t.to("tpu") for t in here]
        torch.testing.assert_close(compiled(*there).cpu(), assigned(*here))
        assert there[0].data_ptr() == there[1].data_ptr()
