"""Inputs that are written, inputs and outputs that share memory: as in eager on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Tensor = torch.Tensor


def check(run: Callable[[str, Callable[..., Any]], list[Tensor]], **options: Any) -> None:
    """Compare what ``run(device, wrap)`` returns, where ``wrap`` compiles on the device."""
    want = run("cpu", lambda f: f)
    got = run("tpu", lambda f: torch.compile(f, **options))
    for a, b in zip(got, want, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-4, atol=1e-5)


def test_inputs_that_overlap_and_are_written() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2 + a.sum()

    def run(device: str, wrap: Callable[..., Any]) -> list[Tensor]:
        base = torch.arange(12.0, device=device).view(3, 4)
        g = wrap(f)
        return [g(base[:2], base[1:]), g(base, base), g(base[0], base[2]), base]

    check(run, fullgraph=True)


def test_a_written_part_of_a_tensor_and_a_view_of_it() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        return x.sum(0), x.t()

    def run(device: str, wrap: Callable[..., Any]) -> list[Tensor]:
        base = torch.arange(24.0, device=device).view(4, 6)
        total, transposed = wrap(f)(base[:, ::2])
        transposed.add_(1)
        return [total, base]

    check(run, fullgraph=True)


def test_metadata_of_an_input_is_changed() -> None:
    def f(x: Tensor) -> Tensor:
        x.unsqueeze_(0)
        x.transpose_(1, 2)
        return x * 2

    def run(device: str, wrap: Callable[..., Any]) -> list[Tensor]:
        x = torch.arange(6.0, device=device).view(2, 3)
        return [wrap(f)(x), x]

    check(run)


def test_an_input_that_gets_the_memory_of_another_one() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            x.set_(y)
        return x * 2

    def run(device: str, wrap: Callable[..., Any]) -> list[Tensor]:
        x, y = torch.ones(2, device=device), torch.zeros(3, device=device)
        out = wrap(f)(x, y)
        y.fill_(5)
        return [out, x]

    check(run)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("with_grad", [False, True])
def test_outputs_that_share_memory(with_grad: bool, dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y, z = x * 2, x + 1
        return y, y.view(-1), y.t(), y, z[1:], z[0]

    def run(device: str, wrap: Callable[..., Any]) -> list[Tensor]:
        x = torch.ones(2, 3, device=device, requires_grad=with_grad)
        y, flat, transposed, again, rest, first = wrap(f)(x)
        assert y is again
        assert flat.data_ptr() == y.data_ptr() == transposed.data_ptr()
        with torch.no_grad():
            y.fill_(5)
            rest.fill_(7)
        return [y, flat, transposed, rest, first]

    check(run, fullgraph=True, dynamic=dynamic)


def test_outputs_of_the_same_place_in_another_dtype_have_memory_of_their_own() -> None:
    f = torch.compile(lambda x: (x + 1, (x + 1).view(torch.int32)), fullgraph=True)
    numbers, bits = f(torch.zeros(2, device="tpu"))
    assert numbers.view(torch.int32).tolist() == bits.tolist()


def test_a_view_of_an_input_is_written_later() -> None:
    def run(device: str, wrap: Callable[..., Any]) -> list[Tensor]:
        x = torch.ones(3, 4, device=device)
        wrap(lambda x: x.view(-1))(x).mul_(3)
        return [x]

    check(run, fullgraph=True)


def test_a_written_value_that_has_a_history() -> None:
    def f(b: Tensor) -> Tensor:
        b.mul_(b.detach() + 1)
        return b.sin()

    def run(device: str, wrap: Callable[..., Any]) -> list[Tensor]:
        a = torch.ones(3, device=device, requires_grad=True)
        b = a * 2
        wrap(f)(b).sum().backward()
        assert a.grad is not None
        return [b, a.grad]

    check(run, fullgraph=True)


def test_tensors_kept_for_backward_are_the_inputs_themselves() -> None:
    f = torch.compile(lambda x, w: (x * w).sum(), fullgraph=True)
    x, w = (torch.ones(3, device="tpu", requires_grad=True) for _ in range(2))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        f(x, w)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), w.data_ptr()}


def test_an_input_that_is_written_before_backward() -> None:
    f = torch.compile(lambda x, w: (x * w).sum(), fullgraph=True)
    x, w = (torch.ones(3, device="tpu", requires_grad=True) for _ in range(2))
    out = f(x, w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_strides_and_layouts() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        expanded = (x[:1] * 2).expand(3, 3)
        return x.t() * 2, (x + 1).contiguous() @ y, expanded, torch.relu(y)

    def run(device: str, wrap: Callable[..., Any]) -> list[Tensor]:
        x = torch.arange(18.0, device=device).view(3, 6)[:, ::2]
        y = torch.arange(15.0, device=device).view(5, 3).t()
        return list(wrap(f)(x, y))

    check(run, fullgraph=True)


def test_constants_and_other_results() -> None:
    def f(x: Tensor) -> tuple[Any, ...]:
        constant = torch.tensor([1.0, 2.0], device=x.device)
        return None, 3, x + constant + torch.tensor(1.0), "text", {"x": x}, (x * 0).cpu()

    x = torch.zeros(2, device="tpu")
    nothing, three, total, text, mapping, host = torch.compile(f, fullgraph=True)(x)
    assert (nothing, three, text) == (None, 3, "text")
    assert mapping["x"] is x
    assert total.tolist() == [2, 3]
    assert host.device.type == "cpu"


VIEWS: list[Callable[[Tensor, int], Tensor]] = [
    lambda x, n: x[n],
    lambda x, n: x[:, n:],
    lambda x, n: x[1:, :n],
    lambda x, n: x.t()[n:, 1],
    lambda x, n: x.narrow(1, n, 2),
]


@pytest.mark.parametrize("view", range(len(VIEWS)))
@pytest.mark.parametrize("with_grad", [False, True])
def test_views_of_an_input_begin_where_a_number_says(view: int, with_grad: bool) -> None:
    f = VIEWS[view]

    def run(device: str, wrap: Callable[..., Any]) -> list[Tensor]:
        torch._dynamo.reset()
        g = wrap(f)
        found = []
        for n in (1, 2, 3, 1):
            x = torch.arange(24.0).reshape(4, 6).to(device).requires_grad_(with_grad)
            of = x * 1 if with_grad else x
            y = g(of, n)
            assert y.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
            if with_grad:
                (y * y).sum().backward()
                assert x.grad is not None
                found += [y, x.grad]
            else:
                y.mul_(10)
                found += [y, x]
        return found

    check(run, dynamic=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_parts_of_an_output_whose_elements_share_a_place(dynamic: bool) -> None:
    def f(x: Tensor) -> list[Tensor]:
        return [x.sum(), (x * 2).expand(4, -1, -1), (x[0] + 1).unfold(0, 2, 1)]

    def run(device: str, wrap: Callable[..., Any]) -> list[Tensor]:
        x = torch.arange(6.0, device=device).view(2, 3)
        total, expanded, windows = wrap(f)(x)
        parts = [expanded[1], expanded[:, 1], expanded[0, :, 1:], expanded.mT, windows[1]]
        return [total, *parts, expanded[2] + 1, expanded.sum(1), windows.sum(0), windows]

    check(run, dynamic=dynamic)


def test_parts_of_a_gradient_whose_elements_share_a_place() -> None:
    def run(device: str, wrap: Callable[..., Any]) -> list[Tensor]:
        x = torch.arange(6.0, device=device).view(2, 3).requires_grad_()
        (gradient,) = torch.autograd.grad(wrap(lambda t: (t.sum(0) * 2).sum())(x), [x])
        return [gradient[1], gradient[:, 1:], gradient + 1]

    check(run)
