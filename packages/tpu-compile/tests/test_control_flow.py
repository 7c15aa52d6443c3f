"""Loops and branches in compiled graphs, and outside of them, give what they give on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.map import map as loop_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils._pytree import tree_leaves

from tpu_compile.graph_op import GRAPHS
from tpu_core.metrics import METRICS

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.tpu.synchronize()  # what is recorded still needs its graphs
    GRAPHS.clear()
    yield
    torch._dynamo.reset()


def run(f: Function, inputs: tuple[torch.Tensor, ...], device: str) -> list[torch.Tensor]:
    """Results and gradients."""
    xs = [x.detach().to(device).requires_grad_(x.requires_grad) for x in inputs]
    results = tree_leaves(f(*xs))
    real = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if real:
        sum(r.square().sum() for r in real).backward()  # type: ignore[union-attr]  # not empty
    found = [*results, *(x.grad for x in xs if x.grad is not None)]
    return [torch.as_tensor(t).detach().cpu() for t in found]


def check(f: Function, *inputs: torch.Tensor, graphs: int | None = None) -> None:
    """Compare the CPU's eager with the device's, compiled and not.

    Args:
        f: The function.
        inputs: Its inputs; gradients are compared of those that require one.
        graphs: Number of graphs that the compiled one makes; 0: it runs op by op.
    """
    want = run(f, inputs, "cpu")
    torch._dynamo.reset()
    compiled = run(torch.compile(f, fullgraph=True), inputs, "tpu")
    expected = 2 if any(x.requires_grad for x in inputs) else 1
    assert len(GRAPHS) == (expected if graphs is None else graphs)
    torch._dynamo.reset()
    for got in (compiled, run(f, inputs, "tpu")):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def square() -> torch.Tensor:
    return torch.randn(4, 4, requires_grad=True)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch(sign: int) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: torch.sin(x @ w), lambda x: x * 2 + w, (x,))

    check(f, (sign * torch.rand(4, 4)).requires_grad_(), square())


def test_a_branch_on_a_size() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.shape[0] > 3, lambda x: x.sin(), torch.cos, (x,))

    check(f, torch.randn(3, requires_grad=True))


def test_a_branch_in_a_branch() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.max() > 100, lambda x: x - 1, lambda x: x.exp(), (x,))

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > -1000, inner, lambda x: x.cos(), (x,))

    check(f, square())


def without_largest(x: torch.Tensor) -> torch.Tensor:
    y = torch.sigmoid(x) * torch.tanh(x) + 1
    return torch.where(y == y.amax(), 0.0, y)


@pytest.mark.usefixtures("fusion_emitters")
def test_a_maximum_in_a_loop() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        start = torch.zeros((), dtype=torch.int64, device=x.device)
        result: tuple[torch.Tensor, ...] = while_loop(
            lambda i, x: (i < 4) & ((without_largest(x) == 0).sum() < 5),
            lambda i, x: (i + 1, without_largest(x)),
            (start, x),
        )
        return result

    check(f, torch.randn(4, 4))


@pytest.mark.usefixtures("fusion_emitters")
def test_a_maximum_in_a_branch() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.max() > 0, without_largest, lambda x: x - x.amin(), (x,))

    check(f, square())


def test_a_loop() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        start = torch.zeros((), dtype=torch.int64, device=x.device)
        result: tuple[torch.Tensor, ...] = while_loop(
            lambda i, x: (i < 5) & (x.abs().max() < 1e3),
            lambda i, x: (i + 1, x @ y + i),
            (start, x),
        )
        return result

    check(f, torch.randn(3, 3), torch.randn(3, 3))


def test_a_loop_that_counts_in_python() -> None:
    def f(x: torch.Tensor) -> tuple[Any, ...]:
        result: tuple[Any, ...] = while_loop(
            lambda i, x: i < 4, lambda i, x: (i + 1, x.sin() + i), (0, x)
        )
        return result

    check(f, torch.randn(3))


def test_gradients_of_a_loop() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        start = torch.zeros((), dtype=torch.int64, device=x.device)
        _, _, made = while_loop(
            lambda i, n, x: i < n,
            lambda i, n, x: (i + 1, n.clone(), torch.sin(x @ w)),
            (start, last, x),
        )
        return made * 2

    def eager(x: torch.Tensor, w: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        for _ in range(int(last)):
            x = torch.sin(x @ w)
        return x * 2

    compiled = torch.compile(f, fullgraph=True)
    x, w = torch.randn(2, 3), torch.randn(3, 3)
    # More rounds than there was room for, and then fewer.
    begun = len(METRICS.compile_events())
    for rounds in (3, 1, 18, 12):
        found = []
        for g, device in ((eager, "cpu"), (compiled, "tpu")):
            xs = [t.detach().to(device).requires_grad_() for t in (x, w)]
            y = g(*xs, torch.tensor(rounds, device=device))
            y.square().sum().backward()
            found.append([y, *(t.grad for t in xs)])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-3, atol=1e-4)
    # However many rounds there are, the loops of forward and backward are ops.
    assert max(e.ops for e in METRICS.compile_events()[begun:]) < 12
    with torch.tpu.no_recompile():
        xs = [t.to("tpu").requires_grad_() for t in (x, w)]
        before = torch.tpu.metrics()["executions"]
        compiled(*xs, torch.tensor(18, device="tpu")).square().sum().backward()
        torch.tpu.synchronize()
        # Up to where the rounds are counted, and the rest, whatever their number.
        assert torch.tpu.metrics()["executions"] - before <= 3


def test_a_loop_without_rounds_keeps_what_it_began_with() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        start = torch.zeros((), dtype=torch.int64, device=x.device)
        result: tuple[torch.Tensor, ...] = while_loop(
            lambda i, x: i < 0, lambda i, x: (i + 1, x.sin()), (start, x)
        )
        return result

    x = square().detach()
    found = torch.compile(f, fullgraph=True)(x.to("tpu").requires_grad_())
    torch.testing.assert_close(found[1].detach().cpu(), x)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(reverse: bool) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        def step(carry: dict[str, torch.Tensor], item: torch.Tensor) -> Any:
            new = torch.tanh(carry["h"] @ w + item)
            return {"h": new}, new * 2

        return scan(step, {"h": x[0]}, x, reverse=reverse)

    check(f, torch.randn(5, 4, requires_grad=True), square())


def test_scan_in_a_scan() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        def inner(c: torch.Tensor, y: torch.Tensor) -> Any:
            return c * w[0] + y, c.sin()

        def outer(c: torch.Tensor, row: torch.Tensor) -> Any:
            carry, ys = scan(inner, c, row)
            return carry, ys

        return scan(outer, x[0, 0], x)

    check(f, torch.randn(3, 2, 4), square().detach())


def test_map() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        mapped: Function = loop_map  # its annotations take positional arguments for one tuple
        return mapped(lambda row, w: (row @ w).sin(), x, w)

    check(f, torch.randn(5, 4, requires_grad=True), square())


def test_associative_scan() -> None:
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        return associative_scan(combine, (a, b), 0, combine_mode="generic")

    check(f, torch.rand(7, 3, requires_grad=True), torch.rand(7, 3, requires_grad=True))


def test_a_nested_region_is_called_in_place() -> None:
    @torch.compiler.nested_compile_region
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return layer(layer(x, w), w)

    check(f, square(), square())


def test_sizes_that_vary() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        carry, ys = scan(lambda c, y: (c * 0.5 + y @ w, c.sin()), x[0] * 0, x)
        return torch.cond(x.sum() > 0, lambda c: c * 2, lambda c: c - 1, (carry,)), ys

    compiled = torch.compile(f, dynamic=True, fullgraph=True)
    w = torch.randn(4, 4)
    for n in (3, 5, 6, 9):
        x = torch.randn(n, 4)
        for got, want in zip(compiled(x.to("tpu"), w.to("tpu")), f(x, w), strict=True):
            torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
    assert len(GRAPHS) == 1


def test_random_numbers_differ_in_each_round() -> None:
    def f(x: torch.Tensor) -> Any:
        return scan(lambda c, y: (c + 1, torch.rand_like(y)), x[0], x)[1]

    compiled = torch.compile(f, fullgraph=True)
    x = torch.zeros(4, 1000, device="tpu")
    torch.manual_seed(1)
    first, second = compiled(x).cpu(), compiled(x).cpu()
    torch.manual_seed(1)
    assert torch.equal(compiled(x).cpu(), first)
    rows = torch.cat([first, second])
    assert len({tuple(r.tolist()) for r in rows}) == 8
    assert 0.45 < rows.mean() < 0.55


def test_random_numbers_of_a_branch() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: F.dropout(x, 0.5), torch.clone, (x,))

    compiled = torch.compile(f, fullgraph=True)
    x = torch.ones(1000, device="tpu")
    first, second = compiled(x), compiled(x)
    assert 400 < (first == 0).sum().item() < 600
    assert not torch.equal(first, second)
    assert torch.equal(compiled(-x), -x)


def test_keys_tell_bodies_apart() -> None:
    def of(number: float) -> str:
        torch._dynamo.reset()
        GRAPHS.clear()

        def f(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x * number, torch.clone, (x,))

        torch.compile(f, fullgraph=True)(torch.ones(3, device="tpu")).cpu()
        (key,) = GRAPHS
        return key

    assert of(2.0) == of(2.0) != of(3.0)


def test_branches_that_differ_raise_what_they_raise_on_the_cpu() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.clone, lambda x: x.long(), (x,))

    messages = []
    for device in ("cpu", "tpu"):
        with pytest.raises(Exception, match="dtype") as caught:
            torch.compile(f, fullgraph=True, backend="eager")(torch.ones(3, device=device))
        messages.append(str(caught.value).split("\n")[0])
    assert messages[0] == messages[1]
