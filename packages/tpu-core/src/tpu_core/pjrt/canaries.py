"""Canaries of known faults: small programs of known value, run in processes of their own.

``python -m tpu_core.pjrt.canaries NAME...`` runs some on the device and prints one line of JSON
before and after each, so that a canary that ends the process is known by name.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Each gives (what the device computed, what is right).
CANARIES: dict[str, Callable[[], tuple[Any, Any]]] = {}
_SECONDS = 300


def _canary(name: str) -> Callable[[Callable[[], tuple[Any, Any]]], Callable[[], tuple[Any, Any]]]:
    def register(function: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
        CANARIES[name] = function
        return function

    return register


@_canary("reduction-of-many-dims")
def _many_dims() -> tuple[Any, Any]:
    import torch

    a, b = (torch.full((3, 1, 2, 2, 8, 8, 8), x).to("tpu") for x in (2.0, 3.0))
    return (a * b).sum(3).unique().tolist(), [12.0]


@_canary("reduction-of-many-rows")
def _many_rows() -> tuple[Any, Any]:
    import torch

    values = []
    for dtype, count in ((torch.float32, 32769), (torch.float64, 16385)):
        m = torch.eye(3, dtype=dtype).to("tpu")
        x = torch.zeros(count, 3, dtype=dtype)
        x[:, 0] = torch.arange(count)
        values.append(torch.vmap(lambda r, m=m: ((m @ r) ** 2).sum())(x.to("tpu"))[-1].item())
    return values, [32768.0**2, 16384.0**2]


@_canary("transposed-bfloat16-product")
def _transposed_product() -> tuple[Any, Any]:
    import torch

    a, b = (torch.ones(shape, dtype=torch.bfloat16).to("tpu") for shape in ((64, 10), (64, 32)))
    a, b = (torch.where(x > 0, x, torch.zeros_like(x)) for x in (a.t(), b))
    return (a @ b).float().unique().tolist(), [64.0]


@_canary("signed-and-of-narrowed")
def _narrowed() -> tuple[Any, Any]:
    import torch

    x, y = (torch.tensor([n, -n]).to("tpu") for n in (12, 10))
    return [*(x.int() & y.int()).tolist(), *(x.int() | y.int()).tolist()], [8, -12, 14, -10]


@_canary("squares-are-never-negative")
def _squares() -> tuple[Any, Any]:
    import torch

    x = torch.tensor([12, 3], dtype=torch.int8).to("tpu")
    least = torch.tensor([-128], dtype=torch.int8).to("tpu")
    return [*(x * x < 0).tolist(), *(least.abs() < 0).tolist()], [True, False, True]


@_canary("division-by-reciprocal")
def _divisions() -> tuple[Any, Any]:
    import torch

    x = torch.tensor([41.0, 47.0, 55.0]).to("tpu")
    by_number = [(x / n)[i].item() for i, n in enumerate((41, 47, 55))]
    return [*by_number, *(x.expand(3, 3) / x[:, None]).diagonal().tolist()], [1.0] * 6


@_canary("quotients-are-not-rounded")
def _quotients() -> tuple[Any, Any]:
    import torch

    x = torch.arange(1.0, 4097.0)
    return (x.to("tpu") / x.to("tpu")).unique().tolist(), [1.0]


@_canary("conversions-are-combined")
def _conversions() -> tuple[Any, Any]:
    import torch

    x = torch.tensor([2**26 + 2**18 + 1], dtype=torch.int32)  # a tie, once it is of float32
    return x.to("tpu").bfloat16().tolist(), [2.0**26]


@_canary("convolutions-of-integers")
def _integer_convolutions() -> tuple[Any, Any]:
    import torch

    x, w = torch.full((1, 2, 3, 3), 2**40).to("tpu"), torch.ones(1, 2, 3, 3).long().to("tpu")
    return torch.nn.functional.conv2d(x, w).flatten().tolist(), [18 * 2**40]


@_canary("inverse-functions-are-folded")
def _inverses() -> tuple[Any, Any]:
    import torch

    x = torch.tensor([100.0, 1e20]).to("tpu")
    return [*x.exp().log().tolist(), *(x * x).sqrt().tolist()], [math.inf] * 2 + [100.0, math.inf]


@_canary("products-with-booleans-are-choices")
def _masked() -> tuple[Any, Any]:
    import torch

    x, mask = torch.tensor([math.inf, -1.0]).to("tpu"), torch.tensor([False, False]).to("tpu")
    return [str(y) for y in (x * mask).tolist()], ["nan", "-0.0"]


@_canary("roundings-are-elided")
def _elided() -> tuple[Any, Any]:
    import torch

    x, y = (torch.tensor([n]).bfloat16().to("tpu") for n in (256.0, 1.0))
    return [*((x + y).float() - 256).tolist(), *y.exp().float().tolist()], [0.0, 2.71875]


@_canary("products-are-contracted")
def _contracted() -> tuple[Any, Any]:
    import torch

    x, y, a, b = (torch.tensor([n]).to("tpu") for n in (1.1, 1.3, 1.3, 1.1))
    return (x * y - a * b).tolist(), [0.0]


@_canary("sum-with-zero-is-dropped")
def _negative_zero() -> tuple[Any, Any]:
    import torch

    return (torch.tensor([-0.0]).to("tpu") + 0.0).signbit().tolist(), [False]


@_canary("names-are-confused")
def _names() -> tuple[Any, Any]:
    import torch

    x, y = torch.zeros(32).to("tpu")[1::2].view(4, 4), torch.zeros(4, 4).to("tpu")
    index, one = torch.tensor([0]).to("tpu"), torch.ones((), device="tpu")
    x.index_put_((index,), one, accumulate=True)
    for column in y.split(1, 1):
        column.fill_(7)
    return x[0].tolist(), [1.0] * 4


@_canary("products-of-padded-constants")
def _padded_constants() -> tuple[Any, Any]:
    import torch

    x = torch.nn.functional.pad(torch.ones(256, 1, device="tpu"), (0, 1))
    return (x @ torch.ones(2, 64).to("tpu")).unique().tolist(), [1.0]


@_canary("denormals-are-zero")
def _denormals() -> tuple[Any, Any]:
    import torch

    x = torch.tensor([1e-39, 2.0**-126]).to("tpu")
    return (x * torch.tensor([2.0**100, 0.5]).to("tpu")).ne(0).tolist(), [True, True]


def run(names: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Run canaries in a child process, and in another one after each that ended it.

    Args:
        names: Of `CANARIES`.

    Yields:
        Name and what is wrong, or None where the value is right.
    """
    left = list(names)
    while left:
        answers, ending = _child(left)
        for name, wrong in answers:
            left.remove(name)
            yield name, wrong
        if left and ending is not None:
            yield left.pop(0), ending


def _child(names: list[str]) -> tuple[list[tuple[str, str | None]], str | None]:
    """Answers of a child process, and its exit status if that is an error."""
    # What an earlier process compiled shows nothing of this one's compiler.
    # Of programs: CPU kernels have none of these faults.
    environment = {**os.environ, "TPU_CACHE": "off", "TPU_TIERS": "compiled"}
    command = [sys.executable, "-P", "-m", "tpu_core.pjrt.canaries", *names]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
        output, errors, ending = done.stdout, done.stderr, f"it ended with {done.returncode}"
        if done.returncode < 0:
            ending = f"it ended by signal {-done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, errors = (x.decode() if x else "" for x in (error.stdout, error.stderr))
        ending = f"it did not end within {_SECONDS} s"
    answers = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    if len(answers) == len(names):
        return [(name, wrong) for name, wrong in answers], None
    last = errors.strip().splitlines()[-1:]
    return [(name, wrong) for name, wrong in answers], ": ".join([ending, *last])


def main(names: list[str]) -> None:
    """Run canaries in this process; a line of JSON each."""
    import tpu_core  # noqa: F401 (registers the device, also where autoload is off)

    for name in names:
        try:
            value, right = CANARIES[name]()
            wrong = None if value == right else f"{value} instead of {right}"
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}".splitlines()[0]
        print(json.dumps([name, wrong]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
