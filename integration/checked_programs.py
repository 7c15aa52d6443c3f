"""Random programs of many sizes, with and without a mistake in a value that an op checks."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F

# A step reads and updates the state, and returns what it is now.
Step = Callable[[torch.Tensor, random.Random, bool, str], torch.Tensor]


def _indices(r: random.Random, count: int, low: int, high: int, is_bad: bool) -> torch.Tensor:
    found = [r.randrange(low, high) for _ in range(count)]
    if is_bad:
        found[r.randrange(count)] = r.choice([high, high + 3, low - 1, low - 300])
    return torch.tensor(found)


def _index(x: torch.Tensor, r: random.Random, bad: bool, d: str) -> torch.Tensor:
    n = x.shape[0]
    return x[_indices(r, n, -n, n, bad).to(d)] + 1


def _two(x: torch.Tensor, r: random.Random, bad: bool, d: str) -> torch.Tensor:
    n, m = x.shape
    rows, columns = _indices(r, n, -n, n, False), _indices(r, n, -m, m, bad)
    return x * x[rows.to(d), columns.to(d)][:, None]


def _put(x: torch.Tensor, r: random.Random, bad: bool, d: str) -> torch.Tensor:
    n = x.shape[0]
    x = x.clone()
    x[_indices(r, 3, -n, n, bad).to(d)] = 0.5
    return x


def _select(x: torch.Tensor, r: random.Random, bad: bool, d: str) -> torch.Tensor:
    n = x.shape[0]
    return x.index_select(0, _indices(r, n, 0, n, bad).to(d)).relu()


def _gather(x: torch.Tensor, r: random.Random, bad: bool, d: str) -> torch.Tensor:
    n, m = x.shape
    return x + x.gather(1, _indices(r, n, 0, m, bad)[:, None].to(d))


def _scatter_add(x: torch.Tensor, r: random.Random, bad: bool, d: str) -> torch.Tensor:
    n, m = x.shape
    return x.scatter_add(1, _indices(r, n, 0, m, bad)[:, None].to(d), x * 0.5)


def _index_add(x: torch.Tensor, r: random.Random, bad: bool, d: str) -> torch.Tensor:
    n = x.shape[0]
    return x.index_add(0, _indices(r, n, 0, n, bad).to(d), x)


def _embedding(x: torch.Tensor, r: random.Random, bad: bool, d: str) -> torch.Tensor:
    n = x.shape[0]
    return F.embedding(_indices(r, n, 0, n, bad).to(d), x) * 0.5


def _loss(x: torch.Tensor, r: random.Random, bad: bool, d: str) -> torch.Tensor:
    n, m = x.shape
    labels = _indices(r, n, 0, m, bad)
    if not bad:
        labels[r.randrange(n)] = -100
        labels[0] = 0  # a mean over something
    return x - F.cross_entropy(x, labels.to(d))


def _take(x: torch.Tensor, r: random.Random, bad: bool, d: str) -> torch.Tensor:
    return x + x.take(_indices(r, x.shape[0], -x.numel(), x.numel(), bad).to(d))[:, None]


def _remainder(x: torch.Tensor, r: random.Random, bad: bool, d: str) -> torch.Tensor:
    n = x.shape[0]
    divisors = torch.tensor([r.choice([-3, -1, 2, 7]) for _ in range(n)])
    if bad:
        divisors[r.randrange(n)] = 0
    return x + (torch.arange(n, device=d) % divisors.to(d))[:, None]


def _plain(x: torch.Tensor, r: random.Random, bad: bool, d: str) -> torch.Tensor:
    return (x.sigmoid() - x.mean(1, keepdim=True)).flip(0)


CHECKED: list[Step] = [
    *(_index, _two, _put, _select, _gather, _scatter_add, _index_add, _embedding, _loss, _take),
    _remainder,
]


def run(seed: int, is_bad: bool, sizes: tuple[int, int], device: str) -> str | torch.Tensor:
    """The result of a random program, or the error that it raises."""
    r = random.Random(seed)
    steps = [r.choice([*CHECKED, _plain]) for _ in range(r.randrange(1, 6))]
    at = r.randrange(len(steps))
    steps[at] = r.choice(CHECKED)
    x = torch.linspace(-1, 1, sizes[0] * sizes[1]).reshape(sizes).to(device)
    try:
        for k, step in enumerate(steps):
            x = step(x, r, is_bad and k == at, device)
        return x.cpu()
    except (IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def check(seed: int) -> None:
    """Run programs of four sizes on the CPU and on the device: equal errors, equal results.

    Raises:
        AssertionError: They differ.
    """
    r = random.Random(seed)
    for _ in range(4):
        sizes = r.randrange(3, 40), r.randrange(3, 12)
        for is_bad in (True, False, r.random() < 0.5):
            expected, found = (run(seed, is_bad, sizes, d) for d in ("cpu", "tpu"))
            assert isinstance(expected, str) == is_bad, expected
            if is_bad:
                assert found == expected, (found, expected)
            else:
                assert isinstance(found, torch.Tensor), found
                torch.testing.assert_close(found, expected, equal_nan=True)
