"""What XLA makes of the memory-bound ops that other libraries have kernels for, on a TPU.

Each is compiled for one v5e by libtpu, which needs no TPU, forward and backward. What the program
moves to and from HBM is set against the least: every operand and result once.

    python integration/benchmarks/fusions.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

import tpu_compile

TOKENS, DIM, HEADS, SIZE = 8192, 4096, 32, 128
HALF = torch.bfloat16
ARRAY = TOKENS * DIM * 2  # bytes


class Of(nn.Module):
    """A function of parameters, so that their gradients are results."""

    def __init__(self, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.operands = nn.ParameterList(torch.empty(s, dtype=HALF) for s in shapes)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*self.operands, *inputs)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (DIM,), weight, 1e-6)


def llama_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As the models of transformers spell it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (DIM,), weight, bias)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def normed_layer(
    x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm where it stands in a model: between a residual sum and a linear layer."""
    stream = x + y
    return stream, F.linear(F.rms_norm(stream, (DIM,), scale, 1e-6), weight)


@dataclass(frozen=True)
class Case:
    """Shapes of the operands that have gradients and of those that have none, and arrays moved."""

    function: Callable[..., Any]
    operands: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[int, ...], ...]
    forward: int
    backward: int


X, ROW, HEAD, ANGLE = (TOKENS, DIM), (DIM,), (HEADS, TOKENS, SIZE), (TOKENS, SIZE)
CASES = {
    "RMSNorm": Case(rms_norm, (X, ROW), (), 2, 3),
    "RMSNorm of Llama": Case(llama_norm, (X, ROW), (), 2, 3),
    "LayerNorm": Case(layer_norm, (X, ROW, ROW), (), 2, 3),
    "SwiGLU": Case(swiglu, (X, X), (), 3, 5),
    "rotary": Case(rotary, (HEAD,), (ANGLE, ANGLE), 2, 3),
}


def plan(case: Case, backward: bool) -> tpu_compile.aot.Plan:
    """Forward alone, or what gradients of the operands take, given that of the result."""
    with torch.device("meta"):
        model = Of(case.function, *case.operands)
        inputs = [torch.empty(s, dtype=HALF) for s in case.inputs]
        grad = torch.empty(case.operands[0], dtype=HALF)
    if not backward:
        return tpu_compile.aot(model, inputs, topology="v5e:1x1")

    def loss(model: Any, grad: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return (model(*inputs) * grad).sum()

    return tpu_compile.aot(model, [grad, *inputs], topology="v5e:1x1", loss=loss)


def update(fused: bool) -> tpu_compile.aot.Plan:
    """AdamW on one matrix of float32."""
    with torch.device("meta"):
        model, grad = nn.Linear(DIM, DIM, bias=False), torch.empty(DIM, DIM)

    def step(model: Any, optimizer: torch.optim.Optimizer, grad: torch.Tensor) -> torch.Tensor:
        model.weight.grad = grad
        optimizer.step()
        return grad.new_zeros(())

    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    return tpu_compile.aot(model, [grad], topology="v5e:1x1", optimizer=optimizer, step=step)


def show(name: str, made: tpu_compile.aot.Plan, least: int) -> None:
    assert made.cost is not None and made.memory is not None
    moved, kept = made.cost.hbm_bytes, made.memory.temporaries
    print(f"| {name} | {least / 2**20:.0f} | {moved / 2**20:.0f} | {(kept or 0) / 2**20:.1f} |")


def main() -> None:
    print("| program | least MiB | MiB moved | temporaries MiB |\n|---|---|---|---|")
    for name, case in CASES.items():
        angles = sum(ARRAY * s[0] * s[1] // (TOKENS * DIM) for s in case.inputs)
        show(f"{name}, forward", plan(case, False), case.forward * ARRAY + angles)
        # The loss, which has every operand in it, and its gradients.
        show(f"{name}, backward", plan(case, True), case.backward * ARRAY + angles)
    # Read two and write their sum, read that, and write the product.
    context = Case(normed_layer, (X, X, ROW, (DIM, DIM)), (), 5, 0)
    show("RMSNorm between sum and product", plan(context, False), 5 * ARRAY + 2 * DIM * DIM)
    for fused in (False, True):
        show(f"AdamW, {'fused' if fused else 'foreach'}", update(fused), 7 * DIM * DIM * 4)


if __name__ == "__main__":
    main()
