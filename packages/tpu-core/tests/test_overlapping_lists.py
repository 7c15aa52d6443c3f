"""Lists that hold a tensor twice, or views of one memory: items are computed in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tpu_core.metrics import METRICS

Tensors = list[torch.Tensor]


def unary(name: str, *args: object) -> Callable[[Tensors], Tensors]:
    def call(xs: Tensors) -> Tensors:
        x = xs[0]
        getattr(torch, name)([x, x, x], *args)
        return [x]

    return call


def views(xs: Tensors) -> Tensors:
    x = xs[0]
    torch._foreach_mul_([x[:3], x[1:]], [2.0, 3.0])
    torch._foreach_add_([x[1:2], x], [x[:1], x.clone()], alpha=2)
    return [x]


def swapped(xs: Tensors) -> Tensors:
    a, b = xs
    torch._foreach_add_([a, b], [b, a])
    torch._foreach_copy_([a, b], [b, a])
    torch._foreach_lerp_([b, a], [a, b], 0.25)
    return xs


def factor_is_written(xs: Tensors) -> Tensors:
    a, b = xs[0][2], xs[1]
    torch._foreach_mul_([a, b], a)
    return xs


def one_lists_items_twice(xs: Tensors) -> Tensors:
    a, b = xs
    torch._foreach_addcmul_([a, b, a], [b, a, b], [a, a, a], value=0.5)
    torch._foreach_addcdiv_([a, a], [b, b], [b, a], [0.5, 2.0])
    return xs


def unscaled(xs: Tensors) -> Tensors:
    x, found = xs[0], torch.zeros(1, device=xs[0].device)
    scale = torch.full((1,), 0.5, device=x.device)
    torch._amp_foreach_non_finite_check_and_unscale_([x, x], found, scale)
    return [x, found]


CALLS = {
    "add": unary("_foreach_add_", 2.0),
    "mul by numbers": unary("_foreach_mul_", [2.0, 3.0, 4.0]),
    "sqrt": unary("_foreach_sqrt_"),
    "pow": unary("_foreach_pow_", 2.0),
    "clamp": unary("_foreach_clamp_min_", [1.0, 3.0, 2.0]),
    "views": views,
    "swapped": swapped,
    "a factor is written": factor_is_written,
    "three lists": one_lists_items_twice,
    "unscaled": unscaled,
}


@pytest.mark.parametrize("call", CALLS)
def test_items_see_what_the_items_before_them_wrote(call: str) -> None:
    a, b = torch.tensor([1.0, 2.5, 3.0, 0.5]), torch.tensor([5.0, 1.5, 2.0, 4.0])
    for _ in range(2):  # the second time from the table of signatures
        expected = CALLS[call]([a.clone(), b.clone()])
        result = CALLS[call]([a.to("tpu"), b.to("tpu")])
        for x, y in zip(result, expected, strict=True):
            torch.testing.assert_close(x.cpu(), y)


@pytest.mark.parametrize("option", ["foreach", "fused"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_given_twice_is_stepped_twice(kind, option: str) -> None:
    results = []
    for device in ("cpu", "tpu"):
        p, q = (nn.Parameter(torch.arange(1.0, n, device=device)) for n in (4, 3))
        optimizer = kind([p, q, p], lr=0.1, **{option: True})
        for _ in range(3):
            optimizer.zero_grad()
            (p.square().sum() + (p[:2] * q).sum()).backward()
            optimizer.step()
        results.append((p.detach().cpu(), q.detach().cpu()))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(y, x)


def test_a_tied_weight_is_clipped_as_often_as_it_is_given() -> None:
    results = []
    for device in ("cpu", "tpu"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        second.weight = first.weight
        model = nn.Sequential(first, second).to(device)
        model(torch.ones(2, 3, device=device)).square().sum().backward()
        parameters = [*model[0].parameters(), *model[1].parameters()]
        norm = nn.utils.clip_grad_norm_(parameters, 0.5)
        results.append([norm.detach().cpu(), *(p.grad.cpu() for p in parameters)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(y, x)


def test_views_side_by_side_are_one_op() -> None:
    x = torch.arange(12.0)
    on_device = x.to("tpu")
    before = METRICS.snapshot()
    torch._foreach_mul_(list(on_device.split(3)), 2.0)
    assert METRICS.delta(before)["ops"] == 1
    torch.testing.assert_close(on_device.cpu(), x * 2)
