"""Checks of values inside of loops and branches of compiled graphs: the CPU's errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from tpu_compile import scan_layers

i = torch.tensor
X = torch.arange(12.0).reshape(4, 3)
GOOD, BAD = i([1, 3, 0]), i([1, 4, 0])


def _cond(p: torch.Tensor, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    def one(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, index).sum()

    def other(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[index - 2].sum() + x.take(index + 7).sum()

    return torch.cond(p.sum() > 0, one, other, (x, index))


def _while(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    def body(k: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return k + 1, total + x[index + k].sum()

    start = torch.zeros((), dtype=torch.int64, device=x.device), torch.zeros((), device=x.device)
    return while_loop(lambda k, total: k < 3, body, start)[1]


def _while_condition(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rounds while the next row's sum is small; the body has no check."""

    def test(k: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return x[index + k].sum() + 0 * total < 20

    start = torch.zeros((), dtype=torch.int64, device=x.device), torch.zeros((), device=x.device)
    return while_loop(test, lambda k, total: (k + 1, total + 2), start)[1]


def _while_both(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    def test(k: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return x.take(index + k).sum() < 5

    def body(k: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return k + 1, total + x[index + k].sum()

    start = torch.zeros((), dtype=torch.int64, device=x.device), torch.zeros((), device=x.device)
    return while_loop(test, body, start)[1]


def _scan(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    def step(total: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = total + x.index_select(0, k.reshape(1)).sum()
        return total, total * 2

    last, each = scan(step, torch.zeros((), device=x.device), index)
    return last + each.sum()


def _map(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch_map(lambda k, x: x.index_select(0, k.reshape(1)), index, x)


def _nested(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    def step(total: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def low(k: torch.Tensor) -> torch.Tensor:
            return x[k.reshape(1)].sum()

        def high(k: torch.Tensor) -> torch.Tensor:
            return x.gather(1, (k - 1).reshape(1, 1)).sum()

        total = total + torch.cond(k < 2, low, high, (k,))
        return total, total * 2

    return scan(step, torch.zeros((), device=x.device), index)[0]


ONE = torch.ones(1)
CALLS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[torch.Tensor, ...]]]] = {
    "cond": (
        _cond,
        [(ONE, X, GOOD), (ONE, X, BAD), (-ONE, X, GOOD), (-ONE, X, i([1, 6, 0])), (ONE, X, GOOD)],
    ),
    "while_loop": (_while, [(X, i([1])), (X, i([2])), (X, i([-5])), (X, i([0]))]),
    "condition": (_while_condition, [(X, i([1])), (X, i([4])), (X, i([-9])), (X - 9, i([1]))]),
    "condition and body": (_while_both, [(X, i([1])), (X, i([-13])), (X - 20, i([1]))]),
    "scan": (_scan, [(X, GOOD), (X, BAD), (X, i([1, 2, -1])), (X, GOOD)]),
    "map": (_map, [(X, GOOD), (X, BAD), (X, GOOD)]),
    "nested": (_nested, [(X, i([0, 2, 3])), (X, i([0, 4, 1])), (X, i([-5, 2, 1])), (X, GOOD)]),
}


def _outcome(function: Callable[..., torch.Tensor], arguments: Any) -> Any:
    try:
        return function(*arguments).cpu()
    except (IndexError, RuntimeError) as error:
        return error


@pytest.mark.parametrize("name", CALLS)
def test_bodies_are_checked(name: str):
    function, calls = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    errors = 0
    for arguments in calls:
        expected = _outcome(function, arguments)
        found = _outcome(compiled, [a.to("tpu") for a in arguments])
        if isinstance(expected, torch.Tensor):
            assert torch.allclose(found, expected), found
            continue
        errors += 1
        # The CPU has other texts for one element than for several.
        assert type(found) is type(expected), found
        (note,) = found.__notes__
        assert os.path.basename(__file__) in note and "found by its program" in note
    assert errors


def test_a_loop_is_the_same_without_checks():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: _scan(x, torch.zeros(3, dtype=torch.int64, device=x.device)))
    assert compiled(X.to("tpu")).item() == _scan(X, torch.zeros(3, dtype=torch.int64)).item()


class _Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.table(index))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_layers_of_one_scan_are_checked(is_compiled: bool):
    torch._dynamo.reset()
    layers = nn.ModuleList(_Lookup() for _ in range(3))
    x = torch.randn(3, 3)
    want = x
    for layer in layers:
        want = layer(want, i([0, 3, 2]))
    layers.to("tpu")

    def run(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return scan_layers(layers, x, index)

    function = torch.compile(run) if is_compiled else run
    for index in ([0, 3, 2], [0, 4, 2], [-1, 3, 2], [0, 3, 2]):
        y = function(x.to("tpu"), i(index).to("tpu"))
        if index == [0, 3, 2]:
            torch.testing.assert_close(y.cpu(), want, rtol=1e-5, atol=1e-6)
        else:
            with pytest.raises(IndexError, match="index out of range in self"):
                y.cpu()


def test_a_compiled_step() -> None:
    table = nn.Embedding(7, 4)
    layer = nn.Linear(4, 3)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(layer(table(tokens)), labels)

    for device in ("cpu", "tpu"):
        table.to(device)
        layer.to(device)
        compiled = torch.compile(step, backend="tpu") if device == "tpu" else step
        found = []
        for tokens, labels in (
            ([1, 2, 6], [0, 1, 2]),
            ([1, 7, 6], [0, 1, 2]),
            ([1, 2, 6], [0, 1, 3]),
            ([1, 2, 6, 0], [0, 1, -100, 1]),
            ([1, 2, 6, 0, 9], [0, 1, -100, 1, 1]),
            ([1, 2, 6, 0, 0], [0, 1, -100, 1, 1]),
        ):
            try:
                loss = compiled(torch.tensor(tokens).to(device), torch.tensor(labels).to(device))
                found.append(round(loss.item(), 4))
            except IndexError as error:
                found.append(str(error))
        if device == "cpu":
            expected = found
    assert found == expected
    assert expected[1:3] == ["index out of range in self", "Target 3 is out of bounds."]
