"""Steps of the fuzzer `mistakes`: each reads or writes a matrix through indices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch._higher_order_ops.while_loop import while_loop

Tensor = torch.Tensor


@dataclass(frozen=True)
class Step:
    """A step on a matrix of n x m.

    Attributes:
        draw: The indices on the CPU, of which one is wrong if asked for.
        apply: The next matrix, of the same shape, from this one and the indices.
        compiled: Whether it is for compiled graphs alone.
        keeps_gradient: Whether autograd can pass it on the CPU.
    """

    draw: Callable[[Random, int, int, bool], list[Tensor]]
    apply: Callable[..., Tensor]
    compiled: bool = False
    keeps_gradient: bool = True


def _integers(r: Random, count: int, low: int, high: int, bad: bool) -> Tensor:
    found = [r.randrange(low, high) for _ in range(count)]
    if bad:
        found[r.randrange(count)] = r.choice(
            [high, high + 1, high + 300, 1 << 40, low - 1, low - 300, -(1 << 40)]
        )
    dtype = torch.int64 if max(map(abs, found)) >= 1 << 31 or r.random() < 0.7 else torch.int32
    return torch.tensor(found, dtype=dtype)


def _long(r: Random, count: int, low: int, high: int, bad: bool) -> Tensor:
    return _integers(r, count, low, high, bad).long()


def _rows(r: Random, n: int, m: int, bad: bool) -> list[Tensor]:
    return [_integers(r, n, 0, n, bad)]


def _long_rows(r: Random, n: int, m: int, bad: bool) -> list[Tensor]:
    return [_long(r, n, -n, n, bad)]


def _signed_rows(r: Random, n: int, m: int, bad: bool) -> list[Tensor]:
    return [_integers(r, n, -n, n, bad)]


def _columns(r: Random, n: int, m: int, bad: bool) -> list[Tensor]:
    return [_long(r, n, 0, m, bad)[:, None]]


def _two(r: Random, n: int, m: int, bad: bool) -> list[Tensor]:
    first = bad and r.random() < 0.5
    return [_long(r, n, -n, n, first), _long(r, n, -m, m, bad and not first)]


def _few_rows(r: Random, n: int, m: int, bad: bool) -> list[Tensor]:
    return [_long(r, 3, -n, n, bad)]


def _elements(r: Random, n: int, m: int, bad: bool) -> list[Tensor]:
    return [_long(r, n, -n * m, n * m, bad)]


def _labels(r: Random, n: int, m: int, bad: bool) -> list[Tensor]:
    labels = _long(r, n, 0, m, bad)
    if not bad:
        labels[r.randrange(n)] = -100
        labels[0] = 0  # a mean over something
    return [labels]


def _classes(r: Random, n: int, m: int, bad: bool) -> list[Tensor]:
    return [_long(r, n, 0, m, bad)]


def _distinct_rows(r: Random, n: int, m: int, bad: bool) -> list[Tensor]:
    rows = list(range(n))
    r.shuffle(rows)
    if bad:
        rows[r.randrange(n)] = r.choice([n, n + 9, -1 - n, -(1 << 40)])
    return [torch.tensor(rows)]


def _divisors(r: Random, n: int, m: int, bad: bool) -> list[Tensor]:
    divisors = [r.choice([-3, -1, 2, 7]) for _ in range(n)]
    if bad:
        divisors[r.randrange(n)] = 0
    return [torch.tensor(divisors)]


def _bags(r: Random, n: int, m: int, bad: bool) -> list[Tensor]:
    return [_long(r, 2 * n, 0, n, bad).reshape(n, 2)]


def _put(x: Tensor, rows: Tensor) -> Tensor:
    x = x.clone()
    x[rows] = 0.5
    return x


def _put_in_view(x: Tensor, rows: Tensor) -> Tensor:
    x = x.clone()
    x.t()[:, rows] += 0.25
    return x


def _accumulate(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    value = torch.ones(rows.shape, device=x.device)
    return x.index_put((rows, columns), value, accumulate=True)


def _fill(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_fill(0, rows, 0.5)


def _loss(x: Tensor, labels: Tensor) -> Tensor:
    return x - F.cross_entropy(x, labels)


def _likelihood(x: Tensor, labels: Tensor) -> Tensor:
    return x * 0.5 + F.nll_loss(x.log_softmax(1), labels, reduction="none")[:, None]


def _cond(x: Tensor, rows: Tensor) -> Tensor:
    return torch.cond(
        x.sum() > 0.37,  # no sum of the inputs comes near it
        lambda x, rows: x.index_select(0, rows).sin(),
        lambda x, rows: x.index_select(0, rows).cos(),
        (x, rows),
    )


def _loop(x: Tensor, rows: Tensor) -> Tensor:
    def body(k: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return k + 1, y * 0.5 + x.index_select(0, rows)

    start = torch.zeros((), dtype=torch.int64, device=x.device), x.clone()
    return while_loop(lambda k, y: k < 3, body, start)[1]


STEPS: dict[str, Step] = {
    "index": Step(_signed_rows, lambda x, rows: x[rows] + 1),
    "index of columns": Step(
        lambda r, n, m, bad: [_long(r, m, -m, m, bad)], lambda x, i: x[:, i] * 0.5
    ),
    "two indices": Step(_two, lambda x, i, j: x * x[i, j][:, None]),
    "put": Step(_few_rows, _put, keeps_gradient=False),
    "put in a view": Step(_few_rows, _put_in_view, keeps_gradient=False),
    "accumulate": Step(_two, _accumulate),
    "index_select": Step(_rows, lambda x, i: x.index_select(0, i).tanh()),
    "gather": Step(_columns, lambda x, i: x + x.gather(1, i)),
    "scatter": Step(_columns, lambda x, i: x.scatter(1, i, 0.25)),
    "scatter_add": Step(_columns, lambda x, i: x.scatter_add(1, i, x[:, :1] * 0.5)),
    "scatter_reduce": Step(_columns, lambda x, i: x.scatter_reduce(1, i, x[:, :1] * 0.5, "amax")),
    "index_add": Step(_rows, lambda x, i: x.index_add(0, i, x)),
    "index_copy": Step(_distinct_rows, lambda x, i: x.index_copy(0, i, x * 0.5)),
    "index_fill": Step(_long_rows, _fill),
    "embedding": Step(_rows, lambda x, i: F.embedding(i, x) * 0.5),
    "embedding_bag": Step(_bags, lambda x, i: F.embedding_bag(i, x) * 0.5),
    "cross_entropy": Step(_labels, _loss),
    "nll_loss": Step(_labels, _likelihood),
    "take": Step(_elements, lambda x, i: x + x.take(i)[:, None]),
    "one_hot": Step(_classes, lambda x, i: x + F.one_hot(i, x.shape[1])),
    "remainder": Step(
        _divisors, lambda x, d: x + (torch.arange(len(d), device=x.device) % d)[:, None]
    ),
    "cond": Step(_rows, _cond, compiled=True),
    "while_loop": Step(_rows, _loop, compiled=True, keeps_gradient=False),
}

# Steps between, that read no indices.
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "centre": lambda x: (x.sigmoid() - x.mean(1, keepdim=True)).flip(0),
    "product": lambda x: torch.tanh(x @ x.t()) @ x * 0.1,
    "softmax": lambda x: x.softmax(1) + x.cumsum(0) * 0.1,
}
