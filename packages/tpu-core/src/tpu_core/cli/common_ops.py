"""Ops that most programs begin with, for ``tpu cache warm --ops``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Shape = tuple[int, ...]
Run = Callable[[], object]

SHAPES: tuple[Shape, ...] = ((), (128,), (128, 128), (32, 128, 128))
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
DEVICE = "tpu"


@dataclass(frozen=True)
class SampleCall:
    """One op on tensors of one dtype and shape, ready to be called."""

    name: str
    dtype: torch.dtype
    shape: Shape
    run: Run

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


_NUMBER_OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add": torch.add,
    "add a number": lambda x, y: x + 2,
    "add_": lambda x, y: x.add_(y),
    "sub": torch.sub,
    "rsub a number": lambda x, y: 2 - x,
    "mul": torch.mul,
    "mul a number": lambda x, y: x * 3,
    "mul_": lambda x, y: x.mul_(y),
    "div": torch.div,
    "div a number": lambda x, y: x / 3,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "gt": torch.gt,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, y),
    "clamp": lambda x, y: x.clamp(min=0),
    "sum": lambda x, y: x.sum(),
    "max": lambda x, y: x.max(),
    "argmax": lambda x, y: x.argmax(),
    "clone": lambda x, y: x.clone(),
    "copy_": lambda x, y: x.copy_(y),
    "fill_": lambda x, y: x.fill_(1),
    "zeros_like": lambda x, y: torch.zeros_like(x),
    "ones_like": lambda x, y: torch.ones_like(x),
}

_FLOAT_OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "relu": lambda x, y: torch.relu(x),
    "gelu": lambda x, y: F.gelu(x),
    "silu": lambda x, y: F.silu(x),
    "sigmoid": lambda x, y: torch.sigmoid(x),
    "tanh": lambda x, y: torch.tanh(x),
    "exp": lambda x, y: torch.exp(x),
    "log": lambda x, y: torch.log(x),
    "sqrt": lambda x, y: torch.sqrt(x),
    "rsqrt": lambda x, y: torch.rsqrt(x),
    "square": lambda x, y: x**2,
    "mean": lambda x, y: x.mean(),
    "rand_like": lambda x, y: torch.rand_like(x),
    "randn_like": lambda x, y: torch.randn_like(x),
}

# Of the last dimension, so that there must be one.
_ROW_OPS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum of rows": lambda x: x.sum(-1),
    "max of rows": lambda x: x.amax(-1),
    "argmax of rows": lambda x: x.argmax(-1),
    "cat": lambda x: torch.cat((x, x), -1),
}
_FLOAT_ROW_OPS: dict[str, Callable[[torch.Tensor], object]] = {
    "mean of rows": lambda x: x.mean(-1),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
}


def common_calls(
    shapes: tuple[Shape, ...] = SHAPES, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> Iterator[SampleCall]:
    """The calls to make, each for every dtype and shape that it takes.

    Args:
        shapes: Shapes of the operands.
        dtypes: Their dtypes.
    """
    for shape in shapes:
        for dtype in dtypes:
            for name, run in _calls(shape, dtype):
                yield SampleCall(name, dtype, shape, run)


def _calls(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[str, Run]]:
    x, y = (torch.ones(shape, dtype=dtype).to(DEVICE) for _ in range(2))
    floating = dtype.is_floating_point
    elementwise = {**_NUMBER_OPS, **(_FLOAT_OPS if floating else {})}
    for name, op in elementwise.items():
        yield name, lambda op=op: op(x, y)  # type: ignore[misc]
    for other in {*DTYPES, torch.bool} - {dtype}:
        kind = str(other).removeprefix("torch.")
        yield f"to {kind}", lambda other=other: x.to(other)  # type: ignore[misc]
    yield "zeros", lambda: torch.zeros(shape, dtype=dtype, device=DEVICE)
    yield "ones", lambda: torch.ones(shape, dtype=dtype, device=DEVICE)
    yield "full", lambda: torch.full(shape, 2, dtype=dtype, device=DEVICE)
    if len(shape) == 1:
        yield "arange", lambda: torch.arange(shape[0], dtype=dtype, device=DEVICE)
    if floating:
        yield "rand", lambda: torch.rand(shape, dtype=dtype, device=DEVICE)
        yield "randn", lambda: torch.randn(shape, dtype=dtype, device=DEVICE)
    if not shape:
        return
    rows = {**_ROW_OPS, **(_FLOAT_ROW_OPS if floating else {})}
    for name, row_op in rows.items():
        yield name, lambda row_op=row_op: row_op(x)  # type: ignore[misc]
    if len(shape) == 2:
        yield "contiguous transpose", lambda: x.t().contiguous()
    if floating:
        yield from _products(x)


def _products(x: torch.Tensor) -> Iterator[tuple[str, Run]]:
    """Products with a square matrix of the last dimension."""
    size = x.shape[-1]
    weight = torch.ones(size, size, dtype=x.dtype).to(DEVICE)
    bias = torch.ones(size, dtype=x.dtype).to(DEVICE)
    yield "linear", lambda: F.linear(x, weight, bias)
    yield "linear without bias", lambda: F.linear(x, weight)
    if x.dim() == 2:
        yield "mm", lambda: torch.mm(x, weight)
        yield "mm with a transpose", lambda: torch.mm(x, weight.t())
        yield "addmm", lambda: torch.addmm(bias, x, weight)
    if x.dim() == 3:
        yield "bmm", lambda: torch.bmm(x, x.transpose(1, 2))
