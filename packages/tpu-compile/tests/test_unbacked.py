"""Sizes that follow from values: ``nonzero``, boolean masks and ``item`` inside of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tpu_compile import unbacked
from tpu_core.metrics import METRICS

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(unbacked, "FILL", 10**6)  # past all arrays: what counts must not see it
    options = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(options):
        yield


def counted(f: Callable[..., Any], values: list[list[float]]) -> dict[str, int]:
    """Compare with the CPU for each input; what was compiled and read meanwhile."""
    compiled = torch.compile(f, fullgraph=True)
    torch.tpu.synchronize()  # what an earlier test left pending
    before = METRICS.snapshot()
    for given in values:
        x = torch.tensor(given, dtype=torch.float32)
        got, want = compiled(x.to("tpu")), f(x)
        torch.testing.assert_close(torch.utils._pytree.tree_map_only(Tensor, Tensor.cpu, got), want)
    found = METRICS.delta(before)
    return {k: int(found[k]) for k in ("compiles", "executions", "fallbacks")}


VALUES = [[1.0, 0, 2, -1, 5], [0, 0, 3, 0, 0], [2, 2, 2, -4, -1], [-1, 7, 9, -2, 4]]


def of_nonzero(x: Tensor) -> tuple[Tensor, Tensor]:
    places = (x > 0).nonzero()
    torch._check(places.shape[0] <= 4)
    return places.float().sum(0), places.float().mean() * x.sum()


def of_a_mask(x: Tensor) -> tuple[Tensor, Tensor]:
    positive = x[x > 0]
    torch._check(positive.shape[0] <= 4)
    return torch.tanh(positive * 2).sum() / positive.shape[0], x + 1


def of_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.stack([x, x * 2, x - 1], 1)[x > 0]
    torch._check(rows.shape[0] <= 4)
    weights = torch.arange(6.0, device=x.device).view(3, 2) / 10
    hidden = F.layer_norm(rows @ weights, (2,)).softmax(0)
    return hidden.sum(0), rows.amax(0), rows.cumsum(0).mean()


def of_a_number(x: Tensor) -> Tensor:
    n = x.abs().sum().to(torch.int64).item()
    torch._check(n <= 64)
    torch._check(n >= 1)
    return (torch.arange(n, device=x.device) * x.mean()).sum()


def of_two_masks(x: Tensor) -> Tensor:
    high, low = x[x > 0], x[x > -1.5]
    torch._check(high.shape[0] <= 4)
    torch._check(low.shape[0] <= 5)
    return torch.exp(-high).sum() * low.std()


def put_back(x: Tensor) -> Tensor:
    (places,) = torch.where(x > 0)
    torch._check(places.shape[0] <= 4)
    return x.index_add(0, places, torch.ones_like(places, dtype=x.dtype)) * 2


@pytest.mark.parametrize("f", [of_nonzero, of_a_mask, of_rows, of_a_number, of_two_masks, put_back])
def test_a_bounded_size_is_one_program(f: Callable[..., Any]) -> None:
    assert counted(f, VALUES) == {"compiles": 1, "executions": len(VALUES), "fallbacks": 0}


def test_no_element_at_all() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        positive = x[x > 0]
        torch._check(positive.shape[0] <= 4)
        return (positive * 2).sum(), positive.mean()

    compiled = torch.compile(f, fullgraph=True)
    x = -torch.ones(4)
    total, mean = compiled(x.to("tpu"))
    assert total.item() == 0
    assert mean.isnan().item()


def test_a_size_past_its_bound_raises_at_the_line_of_the_check() -> None:
    compiled = torch.compile(of_a_mask, fullgraph=True)
    with pytest.raises(RuntimeError, match=r"u0 <= 4.*u0 is 5.*test_unbacked\.py:\d+ in of_a_mask"):
        compiled(torch.ones(5, device="tpu"))
    total, _ = compiled(torch.tensor([1.0, 2, 3, -1, -1]).to("tpu"))
    torch.testing.assert_close(total.cpu(), torch.tanh(torch.tensor([2.0, 4, 6])).mean())


def test_a_bound_that_always_holds_is_not_looked_at() -> None:
    def f(x: Tensor) -> Tensor:
        positive = x[x > 0]
        torch._check(positive.shape[0] <= 8)
        return positive.sum()

    compiled = torch.compile(f, fullgraph=True)
    x = torch.randn(8).to("tpu")
    compiled(x)
    torch.tpu.synchronize()
    before = METRICS.snapshot()
    compiled(x)
    assert METRICS.delta(before)["host_syncs"] == 0


def unbounded(x: Tensor) -> Tensor:
    return torch.tanh(x[x > 0] * 2).sum()


def returned(x: Tensor) -> Tensor:
    positive = x[x > 0]
    torch._check(positive.shape[0] <= 4)
    return positive * 2


def from_one_another(x: Tensor) -> Tensor:
    positive = x[x > 0]
    torch._check(positive.shape[0] <= 4)
    large = positive[positive > 1.5]
    torch._check(large.shape[0] <= 4)
    return large.sum()


def sorted_values(x: Tensor) -> Tensor:
    positive = x[x > 0]
    torch._check(positive.shape[0] <= 4)
    return positive.sort().values[0] + torch.ones(3, device=x.device)


def drawn(x: Tensor) -> Tensor:
    positive = x[x > 0]
    torch._check(positive.shape[0] <= 4)
    return (positive + torch.rand_like(positive) * 0).sum()


@pytest.mark.parametrize("f", [unbounded, returned, from_one_another, sorted_values, drawn])
def test_what_has_no_such_program_is_compiled_in_parts(f: Callable[..., Any]) -> None:
    counted(f, VALUES)


def test_gradients_flow_through_the_parts() -> None:
    grads = []
    for device, f in (("cpu", of_a_mask), ("tpu", torch.compile(of_a_mask, fullgraph=True))):
        x = torch.tensor(VALUES[0], device=device, requires_grad=True)
        total, other = f(x)
        (total + other.sum()).backward()
        assert x.grad is not None
        grads.append(x.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0])


def test_parts_are_programs_that_serve_many_sizes() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, int]:
        rows = torch.stack([x, x * 2, x - 1], 1)[x > 0]
        large = rows[rows.sum(1) > 3]
        return large.softmax(0) * large.shape[0], rows.mean(), rows.shape[0]

    compiled = torch.compile(f, fullgraph=True)
    for n in (20, 23, 30, 26):
        x = torch.cat([torch.rand(n) * 3, -torch.ones(40 - n)])
        before = METRICS.snapshot()
        got, want = compiled(x.to("tpu")), f(x)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(torch.as_tensor(g).cpu(), torch.as_tensor(w))
    found = METRICS.delta(before)
    assert found["compiles"] <= 1
    assert found["host_syncs"] <= 6


def test_a_check_between_parts_raises_at_its_line() -> None:
    compiled = torch.compile(returned, fullgraph=True)
    with pytest.raises(RuntimeError, match=r"u0 <= 4.*u0 is 5.*test_unbacked\.py:\d+ in returned"):
        compiled(torch.ones(5, device="tpu"))


def scaled(x: Tensor) -> Tensor:
    return x * x.max().item()


def counted_up(x: Tensor) -> tuple[Tensor, int]:
    n = x.to(torch.int64).max().item()
    return x * n + (n * 2 - 1), n


@pytest.mark.parametrize("f", [scaled, counted_up])
def test_a_number_that_is_computed_with_stays_in_the_program(f: Callable[..., Any]) -> None:
    assert counted(f, VALUES)["compiles"] == 1
