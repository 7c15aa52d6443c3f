"""A GPT that says nothing of kernels, compiled for a TPU: what attention, norms and loss become.

libtpu takes a minute for the step: these tests are those of ``nox -s tpu_aot``.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

import tpu_compile
import tpu_kernels
from models.gpt import GPT

VOCABULARY, LAYERS, DIM, HEADS, LENGTH, BATCH = 32768, 2, 256, 2, 1024, 8

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@functools.cache
def plan(plain: bool = False) -> tpu_compile.aot.Plan:
    """A training step on one v5e."""
    with torch.device("meta"):
        model = GPT(vocab=VOCABULARY, length=LENGTH, layers=LAYERS, heads=HEADS, dim=DIM)
        ids = torch.empty(BATCH, LENGTH, dtype=torch.int64)
    chosen = {"attention": "plain", "cross_entropy": "plain"} if plain else {}
    with tpu_kernels.using(**chosen):
        return tpu_compile.aot(
            model.bfloat16(), (ids, ids), topology="v5e:1x1", loss="loss", optimizer=adamw
        )


def test_attention_and_loss_take_their_kernels() -> None:
    uses = {(use.op, use.implementation): use for use in plan().kernels}
    assert set(uses) == {("attention", "pallas"), ("cross_entropy", "pallas")}
    # Forward and backward of each layer, and of the loss.
    assert uses["attention", "pallas"].calls == 2 * LAYERS
    assert uses["cross_entropy", "pallas"].calls == 2
    # Attention has one kernel forward and two backward.
    assert plan().hlo.count('custom_call_target="tpu_custom_call"') == 3 * LAYERS + 2
    assert "cross_entropy  " in str(plan()) and "are not built" in str(plan())


def test_norms_are_left_to_xla() -> None:
    """They are in the loops of their neighbours, as ADR 0011 has it."""
    kernels = [line for line in plan().hlo.splitlines() if '"tpu_custom_call"' in line]
    assert kernels and not any("norm" in line.partition("op_name")[2] for line in kernels)
    assert re.search(r"fusion\(.*op_name=\"[^\"]*norm", plan().hlo)


def test_what_the_kernels_save() -> None:
    kernels, plain = plan(), plan(plain=True)
    assert {use.implementation for use in plain.kernels} == {"plain"}
    assert plain.memory.temporaries is not None and kernels.memory.temporaries is not None
    assert kernels.memory.temporaries < 0.5 * plain.memory.temporaries
    assert plain.cost is not None and kernels.cost is not None
    assert kernels.cost.hbm_bytes < 0.5 * plain.cost.hbm_bytes
    assert kernels.model_flops == pytest.approx(plain.model_flops, rel=1e-6)
