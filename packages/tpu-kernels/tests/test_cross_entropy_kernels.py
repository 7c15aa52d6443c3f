"""The kernels of the loss: values by the interpreter, and where they are chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tpu_kernels
from tpu_core.lowering.implementations import Target
from tpu_kernels import KernelRuleError, linear_cross_entropy
from tpu_kernels.ops.cross_entropy.api import KERNEL
from tpu_kernels.ops.cross_entropy.arguments import LossArguments
from tpu_kernels.ops.cross_entropy.pallas import blocks

V5E = Target("tpu", kind="TPU v5e")


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "features", "softcap", "dtype"),
    [
        (5, 300, 128, 0.0, torch.float32),  # parts of blocks
        (1, 7, 128, 0.0, torch.float32),
        (520, 256, 128, 0.0, torch.float32),  # a block of tokens and a little, whole columns
        (9, 515, 256, 3.0, torch.float32),
        (16, 600, 256, 0.0, torch.bfloat16),
        (16, 600, 128, 30.0, torch.bfloat16),  # the cap of Gemma
    ],
)
def test_values_are_those_of_float64(
    tokens: int, vocabulary: int, features: int, softcap: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, features).to(dtype)
    weight = (torch.randn(vocabulary, features) * 0.3).to(dtype)
    target = torch.randint(vocabulary, (tokens,))
    target[::4] = -100 if tokens > 1 else target[::4]

    def loss_and_gradients(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        h, w = (t.to(device, dtype).requires_grad_() for t in (hidden, weight))
        loss = linear_cross_entropy(h, w, target.to(device), softcap=softcap)
        (loss * 3).backward()
        return [t.detach().cpu().double() for t in (loss, h.grad, w.grad) if t is not None]

    expected = loss_and_gradients("cpu", torch.float64)
    with tpu_kernels.using(cross_entropy="pallas"):
        got = loss_and_gradients("tpu", dtype)
    for g, e in zip(got, expected, strict=True):
        # Of bfloat16, a result has 8 bits, and the shares of the softmax have before they are
        # multiplied.
        bound = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(g, e, rtol=bound, atol=bound * float(e.abs().max()))


def test_without_gradients_nothing_is_computed_for_them() -> None:
    hidden, weight = torch.randn(4, 128), torch.randn(40, 128)
    target = torch.randint(40, (4,))
    with tpu_kernels.using(cross_entropy="pallas"), torch.no_grad():
        got = linear_cross_entropy(hidden.to("tpu"), weight.to("tpu"), target.to("tpu"))
    torch.testing.assert_close(got.cpu(), F.cross_entropy(hidden @ weight.T, target))


def arguments(**changes: Any) -> LossArguments:
    made = LossArguments(8192, 4096, 128256, "bfloat16", bias=False, smoothing=0.0, chunk=0)
    return replace(made, **changes)


def test_a_tpu_takes_the_kernels_by_itself() -> None:
    assert KERNEL.select(arguments(), V5E, None).name == "pallas"
    assert KERNEL.select(arguments(dtype="float32"), V5E, None).name == "pallas"
    assert KERNEL.select(arguments(), V5E, "plain").name == "plain"
    assert KERNEL.select(arguments(), Target("cpu"), None).name == "chunked"


@pytest.mark.parametrize(
    ("changes", "target", "text"),
    [
        ({"tokens": 0}, V5E, "There are tokens"),
        ({"features": 100}, V5E, "multiple of 128"),
        ({"features": 2**17}, V5E, "fit its VMEM"),
        ({"dtype": "float64"}, V5E, "dtype is bfloat16 or float32"),
        ({"bias": True}, V5E, "no bias"),
        ({"smoothing": 0.1}, V5E, "label smoothing"),
        ({"chunk": 512}, V5E, "No chunk"),
        ({}, Target("tpu", 4, "TPU v5e"), "for one device, or divided"),
        ({}, Target("tpu", kind="TPU v9"), "The chip is"),
        ({}, Target("tpu"), "The chip is"),
    ],
)
def test_a_rule_that_is_broken_is_named(changes: dict[str, Any], target: Target, text: str) -> None:
    assert KERNEL.select(arguments(**changes), target, None).name == "chunked"
    with pytest.raises(KernelRuleError, match=text):
        KERNEL.select(arguments(**changes), target, "pallas")


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x"])
def test_blocks_of_every_chip_are_whole_tiles(kind: str) -> None:
    for features in (2048, 4096, 8192):
        found = blocks(features, 2, kind)
        if found is None:
            assert (kind, features) == ("TPU v4", 8192)
        else:
            assert found.kept % found.passing == 0 and found.passing % 128 == 0


def test_values_and_gradients_of_divided_tokens() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    script = Path(__file__).with_name("sharded_cross_entropy.py")
    result = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(result.stdout.splitlines()) == 6
