"""Every kernel compiles for every TPU, at the shapes of real models: ``nox -s tpu_aot``.

libtpu compiles in processes of its own, and needs no TPU. What a chip cannot take is computed by
another implementation, and the plan says which rule was broken. The ordinary tests compile the
smallest of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import tpu_compile
import tpu_kernels

# One chip of each; those of two cores are two devices.
TOPOLOGIES = ("v4:1x1x1", "v5e:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1")
HALF, INT8, FLOAT8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn


class Of(nn.Module):
    """A function of parameters, so that their gradients are results."""

    def __init__(self, function: Callable[..., Any], *parameters: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.operands = nn.ParameterList(parameters)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*self.operands, *inputs)


@dataclass(frozen=True)
class Case:
    """What is compiled.

    Attributes:
        function: Of operands, then inputs.
        operands: Shapes of what has gradients, bfloat16.
        inputs: Shape and dtype of what has none.
        op: The op of the library that is in it; None for what XLA is left with.
        plain: What is chosen in place of the kernel, for topologies where its rules do not hold.
        loss: Whether the function gives a loss; else the sum of squares of its result is one, if
            there are operands.
        optimizer: Whether a step of AdamW follows.
    """

    function: Callable[..., Any]
    operands: tuple[tuple[int, ...], ...] = ()
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    op: str | None = None
    plain: tuple[tuple[str, str], ...] = ()
    loss: bool = False
    optimizer: bool = False


def attention(q: Any, k: Any, v: Any, mask: Any = None) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )


def all_to_all(q: Any, k: Any, v: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def of_heads(
    heads: int, key_heads: int, length: int, size: int, function: Any = attention, **more: Any
) -> Case:
    keys = (1, key_heads, length, size)
    return Case(function, ((1, heads, length, size), keys, keys), op="attention", **more)


def loss_of(cap: float = 0.0) -> Callable[..., torch.Tensor]:
    def loss(scale: Any, weight: Any, x: Any, y: Any) -> torch.Tensor:
        logits = F.linear(x * scale, weight)
        if cap:
            logits = torch.tanh(logits / cap) * cap
        return F.cross_entropy(logits.float(), y)

    return loss


def of_vocabulary(tokens: int, features: int, vocabulary: int, cap: float = 0.0) -> Case:
    return Case(
        loss_of(cap),
        ((features,), (vocabulary, features)),
        (((tokens, features), HALF), ((tokens,), torch.int64)),
        op="cross_entropy",
        # Twice 128 tokens and columns of so many features do not fit into 16 MiB.
        plain=(("v4:1x1x1", "chunked"),) if features > 4096 else (),
        loss=True,
    )


def experts(x: Any, up: Any, down: Any, ends: Any) -> torch.Tensor:
    hidden = F.silu(F.grouped_mm(x, up.mT, offs=ends))
    return F.grouped_mm(hidden, down.mT, offs=ends)


def of_experts(rows: int, count: int, dim: int, hidden: int) -> Case:
    shapes = (rows, dim), (count, hidden, dim), (count, dim, hidden)
    cores = tuple((name, "plain") for name in ("v4:1x1x1", "tpu7x:1x1x1"))
    return Case(experts, shapes, (((count,), torch.int32),), op="grouped_mm", plain=cores)


def paged(q: Any, keys: Any, values: Any, lengths: Any, places: Any) -> torch.Tensor:
    return tpu_kernels.paged_attention(q, keys, values, lengths, places)


def ragged(q: Any, pages: Any, lengths: Any, places: Any, starts: Any) -> torch.Tensor:
    return tpu_kernels.ragged_paged_attention(q, pages, lengths, places, starts)


def quantized(whole: Any, by_int8: Any, low: Any, by_float8: Any, x: Any, scale: Any) -> Any:
    one = torch.ones((), device=x.device)
    return (
        torch._int_mm(whole, by_int8.t()),
        torch._scaled_mm(low, by_float8.t(), one, one, out_dtype=HALF),
        torch._weight_int8pack_mm(x, by_int8, scale),
    )


def of_layer(rows: int, features: int, columns: int) -> Case:
    return Case(
        quantized,
        inputs=(
            ((rows, features), INT8),
            ((columns, features), INT8),
            ((rows, features), FLOAT8),
            ((columns, features), FLOAT8),
            ((64, features), HALF),
            ((columns,), HALF),
        ),
    )


# Both have two cores, and this kernel is for programs of one device.
_OF_ONE = tuple((name, "plain") for name in ("v4:1x1x1", "tpu7x:1x1x1"))


def by_four_bits(x: Any, packed: Any, scales_and_zeros: Any) -> torch.Tensor:
    return tpu_kernels.int4_mm(x, packed, 128, scales_and_zeros)


def of_four_bits(tokens: int, columns: int, rows: int) -> Case:
    return Case(
        by_four_bits,
        inputs=(
            ((tokens, columns), HALF),
            ((columns // 8, rows), torch.int32),
            ((columns // 128, rows, 2), HALF),
        ),
        op="int4_mm",
        plain=_OF_ONE,
    )


def rotary(x: Any, cos: Any, sin: Any) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def swiglu_layer(x: Any, scale: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    y = F.rms_norm(x, x.shape[-1:], scale, 1e-6)
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


def layer_norm(x: Any, scale: Any, bias: Any) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], scale, bias)


INDICES = torch.int32
CASES = {
    "attention of Llama-3 8B": of_heads(32, 8, 8192, 128),
    "attention of Llama-3 70B": of_heads(64, 8, 4096, 128),
    "attention of Gemma": of_heads(8, 4, 8192, 256),
    "attention of a GPT": of_heads(12, 12, 4096, 64),
    "attention of ViT-L, 577 patches": of_heads(16, 16, 577, 64, all_to_all),
    "attention of DeepSeek": Case(
        attention,
        ((1, 16, 4096, 192), (1, 16, 4096, 192), (1, 16, 4096, 128)),
        op="attention",
    ),
    "attention with a mask": Case(
        attention,
        ((1, 8, 4096, 128), (1, 2, 4096, 128), (1, 2, 4096, 128)),
        (((1, 1, 4096, 4096), torch.bool),),
        op="attention",
    ),
    "loss of Llama-3 8B": of_vocabulary(8192, 4096, 128256),
    "loss of Llama-3 70B": of_vocabulary(8192, 8192, 128256),
    "loss of Gemma-2 9B": of_vocabulary(8192, 3584, 256000, 30.0),
    "loss of a GPT-2": of_vocabulary(16384, 768, 50304),
    "experts of Mixtral": of_experts(8192, 8, 4096, 14336),
    "experts of DeepSeek": of_experts(8192, 64, 2048, 1408),
    "paged attention of Llama-3 8B": Case(
        paged,
        inputs=(
            ((64, 32, 128), HALF),
            *((((8, 4096, 16, 128), HALF),) * 2),
            ((64,), INDICES),
            ((64, 512), INDICES),
        ),
        op="paged_attention",
    ),
    "ragged paged attention of Llama-3 8B": Case(
        ragged,
        inputs=(
            ((2048, 32, 128), HALF),
            ((4096, 16, 16, 128), HALF),
            ((64,), INDICES),
            ((64, 512), INDICES),
            ((65,), INDICES),
        ),
        op="ragged_paged_attention",
    ),
    "quantized layer of Llama-3 8B": of_layer(8192, 4096, 14336),
    "layer of Llama-3 8B by 4 bits, one token": of_four_bits(1, 4096, 14336),
    "layer of Llama-3 8B by 4 bits, 64 tokens": of_four_bits(64, 14336, 4096),
    "layer of Llama-3 8B by 4 bits, a prompt": of_four_bits(2048, 4096, 14336),
    "rotary embedding of Llama-3 8B": Case(
        rotary, ((1, 32, 8192, 128),), (((8192, 128), HALF), ((8192, 128), HALF))
    ),
    "RMSNorm and SwiGLU of Llama-3 8B, AdamW": Case(
        swiglu_layer,
        ((4096, 4096), (4096,), (14336, 4096), (14336, 4096), (4096, 14336)),
        optimizer=True,
    ),
    "LayerNorm of ViT-L": Case(layer_norm, ((64 * 577, 1024), (1024,), (1024,))),
}
QUICK = ("attention of ViT-L, 577 patches", "v5e:1x1")
PAIRS = [
    pytest.param(name, topology, marks=[] if (name, topology) == QUICK else pytest.mark.slow)
    for name in CASES
    for topology in TOPOLOGIES
]


def squares(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    return model(*inputs).float().square().mean()


def compiled(case: Case, topology: str) -> tpu_compile.aot.Plan:
    with torch.device("meta"):
        model = Of(case.function, *(torch.empty(s, dtype=HALF) for s in case.operands))
        inputs = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in case.inputs)
    loss = (lambda model, *x: model(*x)) if case.loss else squares if case.operands else None
    fused = {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)}
    return tpu_compile.aot(
        model,
        inputs,
        topology=topology,
        batch="data" if case.loss else None,
        loss=loss,
        **(fused if case.optimizer else {}),
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "topology"), PAIRS)
def test_kernels_compile(name: str, topology: str) -> None:
    case = CASES[name]
    plan = compiled(case, topology)
    assert plan.executable and plan.cost is not None
    found = {(use.op, use.implementation) for use in plan.kernels}
    if case.op is None:
        assert not found and "tpu_custom_call" not in plan.hlo
        return
    other = dict(case.plain).get(topology)
    assert (case.op, other or "pallas") in found
    if other is None:
        assert 'custom_call_target="tpu_custom_call"' in plan.hlo
    else:
        # It says why, and no kernel is in the program, but for libtpu's own for rows in groups.
        assert all(use.why.startswith("pallas: ") for use in plan.kernels)
        assert case.op == "grouped_mm" or "tpu_custom_call" not in plan.hlo


@pytest.mark.parametrize(("name", "op"), [("loss of a GPT-2", "cross_entropy")])
def test_a_chip_that_a_kernel_does_not_know(name: str, op: str) -> None:
    """It is compiled without the kernel, and the plan says so."""
    (use,) = compiled(CASES[name], "v3:1x1").kernels
    assert (use.op, use.implementation) == (op, "chunked")
    assert use.why.startswith("pallas: The chip is a TPU v4")
