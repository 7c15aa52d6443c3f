"""Slices that change places within rows, as in rotary embeddings, by shifted rows."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.fx import GraphModule

from tpu_compile.aot import trace as tracing
from tpu_compile.fx_utils import lowering_of
from tpu_core import lowering, runtime
from tpu_core.lowering.evaluate import to_jax
from tpu_core.lowering.implementations import Target
from tpu_core.recorder.compute import GraphEvaluator

Tensor = torch.Tensor
MOVED = "tpu_compile.moved_lanes.default"


@pytest.fixture(autouse=True, scope="module")
def started() -> None:
    runtime.runtime()
    lowering.load()


def sliced(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def chunked(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def split(x: Tensor) -> Tensor:
    first, second = torch.split(x, [x.shape[-1] // 2, x.shape[-1] // 2], dim=-1)
    return torch.cat([second.neg(), first], x.dim() - 1)


Rotated = Callable[[Tensor], Tensor]


def neighbours(x: Tensor) -> Tensor:
    """As in GPT-J, Cohere and GLM."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def rotary(rotated: Rotated) -> Callable[..., Tensor]:
    return lambda x, cos, sin: x * cos + rotated(x) * sin


def traced(f: Any, inputs: list[Tensor]) -> GraphModule:
    mode = tracing.fake_mode()
    return tracing.trace(f, [tracing.fake_like(x, mode) for x in inputs], mode)


def count(graph: GraphModule) -> int:
    return [str(n.target) for n in graph.graph.nodes].count(MOVED)


def run(graph: GraphModule, inputs: list[Tensor]) -> list[np.ndarray]:
    """The results of a program for a TPU, computed here."""
    with jax.enable_x64(True), Target("tpu").applied():
        function = jax.jit(
            lambda arrays: GraphEvaluator.run(graph, arrays, None, entry_of=lowering_of)
        )
        found = function([to_jax(x) for x in inputs])
    return [np.asarray(x, np.float64) for x in found]


def with_gradient(f: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    def both(x: Tensor, grad: Tensor, *rest: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = f(x, *rest)
        return [y.detach(), *torch.autograd.grad(y, x, grad)]

    return both


@pytest.mark.parametrize(
    ("rotated", "shape", "angles"),
    [
        (sliced, (2, 4, 7, 128), (2, 1, 7, 128)),  # Llama
        (chunked, (1, 3, 5, 256), (1, 1, 5, 256)),  # Gemma
        (split, (3, 2, 13, 64), (1, 13, 64)),
        (sliced, (5, 1, 1, 2), (2,)),
        (chunked, (3, 6), (3, 1)),
        (neighbours, (2, 3, 7, 64), (7, 64)),
        (neighbours, (1, 1, 2), (1, 2)),
    ],
)
def test_rows_are_shifted_with_gradients(rotated: Rotated, shape: Any, angles: Any) -> None:
    torch.manual_seed(0)
    wide = [torch.randn(s, dtype=torch.float64) for s in (shape, shape, angles, angles)]
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        inputs = [x.to(dtype) for x in wide]
        f = with_gradient(rotary(rotated))
        graph = traced(f, inputs)
        assert count(graph) >= 2
        assert not any(
            "slice" in str(n.target) for n in graph.graph.nodes if MOVED != str(n.target)
        )
        want = f(*(x.double() for x in inputs))
        for got, y in zip(run(graph, inputs), want, strict=True):
            np.testing.assert_allclose(got, y.numpy(), rtol=bound, atol=bound)


def test_what_is_not_finite_stays_in_its_lanes() -> None:
    x = torch.arange(1.0, 9.0)[None]
    x[0, 1], x[0, 6] = float("nan"), float("inf")
    cos, sin = torch.randn(8), torch.randn(8)
    graph = traced(lambda *xs: [rotary(sliced)(*xs)], [x, cos, sin])
    want = rotary(sliced)(x, cos, sin).numpy()
    (got,) = run(graph, [x, cos, sin])
    np.testing.assert_allclose(got, want, rtol=1e-6)


def joined(pieces: list[tuple[int, int, bool]], x: Tensor) -> list[Tensor]:
    return [torch.cat([-x[:, a:b] if negated else x[:, a:b] for a, b, negated in pieces], 1)]


def places(pieces: list[tuple[int, int, bool]]) -> list[int]:
    lengths = [b - a for a, b, _ in pieces]
    return [sum(lengths[:i]) for i in range(len(lengths))]


def test_a_part_of_a_row() -> None:
    """As in GPT-NeoX: the part is a row of its own, whatever it is a slice of."""

    def f(x: Tensor, grad: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        def part(x: Tensor) -> Tensor:
            own = x[..., 3:15].chunk(2, -1)[0]
            return torch.cat((own[..., :4] * cos + sliced(own[..., :4]) * sin, own[..., 4:]), -1)

        return with_gradient(part)(x, grad)

    inputs = [torch.randn(s) for s in ((2, 3, 15), (2, 3, 6), (4,), (3, 4))]
    graph = traced(f, inputs)
    assert count(graph) >= 2
    for got, want in zip(run(graph, inputs), f(*inputs), strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-6, atol=1e-6)


def test_pieces_of_any_number_and_order() -> None:
    choose = random.Random(0)
    x = torch.randn(3, 24)
    for _ in range(8):
        inner = sorted(choose.sample(range(1, 24), choose.randint(1, 3)))
        ends = [0, *inner, 24 - choose.randint(0, 1)]
        pieces = [(a, b, choose.random() < 0.5) for a, b in zip(ends, ends[1:])]
        choose.shuffle(pieces)

        f = functools.partial(joined, pieces)
        graph = traced(f, [x])
        shifts = {a - at for (a, _, _), at in zip(pieces, places(pieces))}
        whole = ends[-1] - ends[0] == 24
        assert count(graph) == (whole and len(shifts) <= 3 and shifts != {0})
        (got,) = run(graph, [x])
        np.testing.assert_array_equal(got, f(x)[0].double().numpy())


def test_a_slice_put_back_elsewhere_leaves_zeros_behind() -> None:
    grad = torch.randn(2, 5, 12)

    def back(grad: Tensor, factor: Tensor) -> list[Tensor]:
        made = (grad * factor)[..., 1:6].neg()
        return [torch.ops.aten.slice_backward(made, [2, 5, 12], 2, 6, 11, 1)]

    for factor in (torch.tensor(float("inf")), torch.randn(12), torch.randn(2, 5, 1)):
        inputs = [grad, factor]
        graph = traced(back, inputs)
        assert count(graph) >= 1
        (want,) = back(*inputs)
        (got,) = run(graph, inputs)
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)


def test_a_product_is_not_built_for_its_shift() -> None:
    """The norm of Qwen's heads is in the loop that reads the shifted heads."""

    def f(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return [rotary(sliced)(weight * normed.to(x.dtype), cos, sin)]

    inputs = [torch.randn(s) for s in ((2, 3, 5, 16), (16,), (5, 16), (5, 16))]
    inputs = [x.bfloat16() for x in inputs]
    graph = traced(f, inputs)
    moved = [n for n in graph.graph.nodes if str(n.target) == MOVED]
    assert {n.args[0].op for n in moved} == {"placeholder"}
    (want,) = f(*(x.double() for x in inputs))
    (got,) = run(graph, inputs)
    np.testing.assert_allclose(got, want.numpy(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.cat((x[:, 2:], x[:, :2])),
        lambda x: torch.cat((x[:2], x[2:]), 0),
        lambda x: torch.cat((x[:, 2:], (x + 1)[:, :2]), 1),
        lambda x: torch.cat((x[:, 1::2], x[:, ::2]), 1),
        lambda x: torch.cat((x[:, 2:], x[:, :3]), 1),
        lambda x: torch.cat((x.repeat(1, 200)[:, 2:], x.repeat(1, 200)[:, :2]), 1),
    ],
)
def test_others_stay_as_they_are(f: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 4)
    graph = traced(lambda x: [f(x)], [x])
    assert count(graph) == 0
    assert "aten.cat.default" in [str(n.target) for n in graph.graph.nodes]


def test_compiled_with_gradients_and_lengths_that_vary(caplog: pytest.LogCaptureFixture) -> None:
    f = torch.compile(rotary(chunked), fullgraph=True)
    with caplog.at_level(logging.INFO, "tpu_compile"), Target("tpu").applied():
        for length in (7, 13, 3):
            torch.manual_seed(length)
            x, grad = torch.randn(2, 3, length, 16), torch.randn(2, 3, length, 16)
            cos, sin = torch.randn(2, 1, length, 16), torch.randn(2, 1, length, 16)
            results = []
            for function, device in ((f, "tpu"), (rotary(chunked), "cpu")):
                own = x.to(device).requires_grad_()
                y = function(own, cos.to(device), sin.to(device))
                y.backward(grad.to(device))
                results.append((y.detach().cpu(), own.grad.cpu()))
            for got, want in zip(*results):
                torch.testing.assert_close(got, want)
    assert "made of shifted rows" in caplog.text
