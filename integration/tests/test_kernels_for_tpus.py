"""Models that take kernels by themselves where they are compiled for a TPU, without a TPU."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import tpu_compile
import tpu_kernels

HEADS, SIZE, LENGTH = 2, 128, 4096


class Block(nn.Module):
    """Attention with its projections, as in any transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HEADS * SIZE)
        self.qkv = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, HEADS * SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, SIZE)).transpose(1, 3)
        q, k, v = parts.unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


@functools.cache
def plan(implementation: str | None = None) -> tpu_compile.aot.Plan:
    """Forward and backward on one v5e."""
    with torch.device("meta"):
        model, x = Block().bfloat16(), torch.empty(1, LENGTH, HEADS * SIZE, dtype=torch.bfloat16)
    chosen = {} if implementation is None else {"attention": implementation}
    with tpu_kernels.using(**chosen):
        return tpu_compile.aot(model, (x,), topology="v5e:1x1", loss=loss)


def test_attention_takes_no_memory_for_its_scores() -> None:
    flash, plain = plan(), plan("plain")
    activation, scores = LENGTH * HEADS * SIZE * 2, HEADS * LENGTH * LENGTH * 2  # of bfloat16
    assert flash.memory.temporaries is not None and flash.memory.temporaries <= 20 * activation
    assert plain.memory.temporaries is not None and plain.memory.temporaries >= scores
    assert flash.cost is not None and plain.cost is not None
    assert flash.cost.hbm_bytes <= plain.cost.hbm_bytes / 4


def test_a_plan_counts_what_is_in_the_kernels() -> None:
    flash, plain = plan(), plan("plain")
    assert flash.hlo.count('custom_call_target="tpu_custom_call"') == 3
    assert "tpu_custom_call" not in plain.hlo
    assert flash.cost is not None and plain.cost is not None
    # Blocks of 512 above the diagonal are left out; the scores are computed in each kernel anew.
    product = 2 * HEADS * SIZE * LENGTH * (LENGTH + 512) // 2
    weights = 4 * (HEADS * SIZE) ** 2
    assert flash.cost.product_flops == 3 * 2 * LENGTH * weights + 9 * product
    assert not any("kernel(" in name for name, _ in flash.cost.idle)


class Regularized(nn.Module):
    """Attention with a learned bias, as in T5, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(SIZE))
        self.bias = nn.Parameter(torch.empty(1, HEADS, 1024, 1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gain
        return F.scaled_dot_product_attention(x, x, x, self.bias, dropout_p=0.1)


@pytest.mark.parametrize("topology", ["v5e:1x1", pytest.param("v6e:1x1", marks=pytest.mark.slow)])
def test_dropout_and_learned_biases_have_kernels(topology: str) -> None:
    with torch.device("meta"):
        model, x = Regularized().bfloat16(), torch.empty(2, HEADS, 1024, SIZE).bfloat16()
    made = tpu_compile.aot(model, (x,), topology=topology, loss=loss)
    assert made.hlo.count('custom_call_target="tpu_custom_call"') == 4
    assert made.memory.temporaries is not None
    assert made.memory.temporaries < 2 * HEADS * 1024 * 1024 * 2


class Grouped(nn.Module):
    """A block whose layers can be divided by heads, two of which share a key."""

    def __init__(self) -> None:
        super().__init__()
        size = 4 * SIZE
        self.q = nn.Linear(size, size, bias=False)
        self.k, self.v = (nn.Linear(size, size // 2, bias=False) for _ in range(2))
        self.out = nn.Linear(size, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def test_kernels_of_a_divided_program_are_given_their_parts() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Grouped(), Grouped()).bfloat16()
        x = torch.empty(4, 512, 4 * SIZE, dtype=torch.bfloat16)
    rules = {"*.[qkv].weight": ("model", None), "*.out.weight": (None, "model")}
    made = tpu_compile.aot(
        model,
        (x,),
        topology="v5e:2x2",
        mesh={"data": 2, "model": 2},
        shardings=rules,
        scan=True,
        loss=loss,
    )
    kernels = [line for line in made.hlo.splitlines() if '"tpu_custom_call"' in line]
    assert len(kernels) == 3
    forward, of_query, of_keys = (line.partition("=")[2] for line in kernels)
    assert "bf16[2,2,512,128]" in forward.partition(")")[0] and "bf16[2,2,512,128]" in of_query
    assert "bf16[2,1,512,128]" in of_keys.partition(")")[0]
    # Nothing is gathered for them.
    assert not any(word in made.hlo for word in ("all-gather", "all-to-all", "collective-permute"))


class Decoding(nn.Module):
    """A step of serving: single tokens, then a ragged batch, over pages."""

    def forward(self, query: torch.Tensor, pages: torch.Tensor, *rest: torch.Tensor) -> Any:
        keys, lengths, places, starts = rest
        single = tpu_kernels.paged_attention(query[: len(lengths)], keys, keys, lengths, places)
        return single, tpu_kernels.ragged_paged_attention(query, pages, lengths, places, starts)


@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
def test_attention_over_pages_has_kernels(topology: str) -> None:
    with torch.device("meta"):
        query = torch.empty(40, 32, 128, dtype=torch.bfloat16)
        pages = torch.empty(100, 16, 2 * 8, 128, dtype=torch.bfloat16)
        keys = torch.empty(8, 100, 16, 128, dtype=torch.bfloat16)
        lengths, starts = torch.empty(4, dtype=torch.int32), torch.empty(5, dtype=torch.int32)
        places = torch.empty(4, 20, dtype=torch.int32)
    arguments = (query, pages, keys, lengths, places, starts)
    made = tpu_compile.aot(Decoding(), arguments, topology=topology)
    assert made.hlo.count('custom_call_target="tpu_custom_call"') == 2


class Served(nn.Module):
    """Attention over pages between layers that are divided by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(256, 32 * 128, bias=False)
        self.out = nn.Linear(32 * 128, 256, bias=False)

    def forward(self, x: torch.Tensor, pages: torch.Tensor, *rest: torch.Tensor) -> Any:
        keys, lengths, places, starts = rest
        query = self.q(x).unflatten(-1, (32, 128))
        many = tpu_kernels.ragged_paged_attention(query, pages, lengths, places, starts)
        single = tpu_kernels.paged_attention(query[: len(lengths)], keys, keys, lengths, places)
        return self.out(many.flatten(1)), self.out(single.flatten(1))


def test_attention_over_pages_stays_divided_by_heads() -> None:
    with torch.device("meta"):
        model, x = Served().bfloat16(), torch.empty(64, 256).bfloat16()
        pages, keys = torch.empty(128, 16, 16, 128), torch.empty(8, 128, 16, 128)
        lengths, starts = (torch.empty(n, dtype=torch.int32) for n in (16, 17))
        places = torch.empty(16, 20, dtype=torch.int32)
        arguments = (x, pages.bfloat16(), keys.bfloat16(), lengths, places, starts)
    rules = {"q.weight": ("model", None), "out.weight": (None, "model")}
    made = tpu_compile.aot(
        model, arguments, topology="v5e:2x4", mesh={"model": 8}, batch=None, shardings=rules
    )
    found = {(use.op, use.implementation) for use in made.kernels}
    assert found == {("ragged_paged_attention", "pallas"), ("paged_attention", "pallas")}
    kernels = [line for line in made.hlo.splitlines() if '"tpu_custom_call"' in line]
    # A head of the keys on each device, and the four of the query that share it.
    assert any("bf16[64,4,128]" in line.partition(")")[0] for line in kernels)
    assert any("f32[16,4,1,128]" in line.partition(")")[0] for line in kernels)
    assert not any(word in made.hlo for word in ("all-gather", "all-to-all"))


EXPERTS, ROWS = 16, 4096


class Experts(nn.Module):
    """Two layers with weights for each group of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, 2048, 1024))
        self.down = nn.Parameter(torch.empty(EXPERTS, 1024, 2048))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(F.grouped_mm(x, self.up.mT, offs=ends))
        return F.grouped_mm(hidden, self.down.mT, offs=ends)


def test_each_row_of_experts_is_multiplied_once() -> None:
    with torch.device("meta"):
        model, x = Experts().bfloat16(), torch.empty(ROWS, 1024, dtype=torch.bfloat16)
        ends = torch.empty(EXPERTS, dtype=torch.int32)

    def products(**chosen: str) -> float:
        with tpu_kernels.using(**chosen):
            made = tpu_compile.aot(
                model,
                (x, ends),
                topology="v5e:1x1",
                loss=lambda model, x, ends: model(x, ends).float().square().mean(),
            )
        assert made.cost is not None
        return made.cost.product_flops

    each = 2 * ROWS * 1024 * 2048
    # Forward, and the gradients of weights and of what is between the layers; `x` needs none.
    assert products() == 5 * each
    # Without the kernel the gradients of weights multiply all rows for each expert.
    assert products(grouped_mm="plain") == (3 + 2 * EXPERTS) * each


class Quantized(nn.Module):
    """Layers with weights of 8 bits, by 8-bit integers, 8-bit floats, and activations of 16."""

    def __init__(self) -> None:
        super().__init__()
        for name, dtype in (("by_int8", torch.int8), ("by_float8", torch.float8_e4m3fn)):
            self.register_buffer(name, torch.empty(4096, 2048, dtype=dtype))
        self.register_buffer("by_bfloat16", torch.empty(4096, 2048, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(4096, dtype=torch.bfloat16))

    def forward(
        self, whole: torch.Tensor, low: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        one = torch.ones((), device=x.device)
        return (
            torch._int_mm(whole, self.by_int8.t()),
            torch._scaled_mm(low, self.by_float8.t(), one, one, out_dtype=torch.bfloat16),
            torch._weight_int8pack_mm(x, self.by_bfloat16, self.scale),
        )


def test_quantized_weights_are_read_as_they_are() -> None:
    with torch.device("meta"):
        model = Quantized()
        given = (
            torch.empty(1024, 2048, dtype=torch.int8),
            torch.empty(1024, 2048, dtype=torch.float8_e4m3fn),
            torch.empty(16, 2048, dtype=torch.bfloat16),
        )
    made = tpu_compile.aot(model, given, topology="v5e:1x1")
    types = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", made.hlo))
    products = re.findall(r"= (\w+)\[\S* convolution\(%([\w.\-]+), %([\w.\-]+)\)", made.hlo)
    assert ("s32", "s8", "s8") in {(out, types[a], types[b]) for out, a, b in products}
    assert made.cost is not None
    least = 3 * 4096 * 2048 + 2 * 1024 * 2048 + 1024 * 4096 * (4 + 2)
    assert made.cost.hbm_bytes <= 1.02 * least
