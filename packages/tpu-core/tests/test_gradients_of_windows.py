"""`select_backward` and `slice_backward`, whose places are run-time inputs, called as users may."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

aten = torch.ops.aten


def _call(draw: random.Random) -> tuple[Any, list[int], tuple[Any, ...]]:
    """An overload, the shape of its gradient, and its other arguments: some of them are wrong."""
    sizes = [draw.randint(0, 4) for _ in range(draw.randint(1, 3))]
    dim = draw.randint(-len(sizes), len(sizes) - 1)
    shape = list(sizes)
    op = aten.select_backward.default
    if draw.random() < 0.5:
        del shape[dim]
        places: tuple[int, ...] = (draw.randint(-5, 5),)
    else:
        op = aten.slice_backward.default
        places = (draw.randint(-5, 5), draw.choice([draw.randint(-5, 6), 2**63 - 1]))
        places += (draw.choice([1, 1, 2, 3]),)
        shape[dim] = len(range(sizes[dim])[slice(*places)])
    if shape and draw.random() < 0.15:
        shape[draw.randrange(len(shape))] = draw.randint(0, 4)
    return op, shape, (sizes, dim + len(sizes) * (draw.random() < 0.03), *places)


def _outcome(op: Any, grad: torch.Tensor, arguments: tuple[Any, ...]) -> Any:
    try:
        return op(grad, *arguments).cpu()
    except (RuntimeError, IndexError) as error:
        return type(error), str(error)


@pytest.mark.filterwarnings("ignore:.*has no lowering")
@pytest.mark.parametrize("tier", ["compiled", "auto"], indirect=True)
@pytest.mark.usefixtures("tier")
def test_random_calls() -> None:
    draw = random.Random(0)
    for _ in range(300):
        op, shape, arguments = _call(draw)
        grad = torch.randn(shape)
        expected = _outcome(op, grad, arguments)
        result = _outcome(op, grad.to("tpu"), arguments)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
            assert result.stride() == expected.stride()
        else:
            assert result == expected
