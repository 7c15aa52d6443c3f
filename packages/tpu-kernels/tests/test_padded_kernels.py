"""Programs on padded arrays for TPUs: attention without the kernel, which takes no padding."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from tpu_core import config, modes
from tpu_core.compiler.cross_compile import CrossCompiler, compiling
from tpu_core.lowering.implementations import Target
from tpu_core.metrics import METRICS
from tpu_kernels.ops.attention.api import KERNEL
from tpu_kernels.ops.attention.arguments import of_forward


class Compiler:
    """Takes programs and compiles nothing."""

    kind, device = "TPU v5e", 0

    def compile(self, module: bytes) -> tuple[bytes, str]:
        return b"executable", "PJRT C API\nTFRT TPU v5 lite"


def attention(device: str, n: int) -> torch.Tensor:
    x = torch.randn(2, 4, n, 128, generator=torch.Generator().manual_seed(n))
    x = x.to(device).requires_grad_()
    F.scaled_dot_product_attention(x, x.cos(), x.sin()).square().sum().backward()
    assert x.grad is not None
    return x.grad


def test_attention_of_other_lengths_is_lowered_for_the_chip() -> None:
    kept: dict[str, Any] = {}
    cross = CrossCompiler("v5e:1x1", Compiler(), lambda key, data, _: kept.update({key: data}))
    before = METRICS.snapshot()
    with modes.using("fused"), config.override(compile="blocking", tiers="compiled"):
        with compiling(cross):
            for n in (130, 150, 170, 200, 240):
                grad = attention("tpu", n).cpu()
                assert_close(grad, attention("cpu", n), rtol=1e-4, atol=1e-5)
        cross.wait()
    assert not cross.failed
    assert METRICS.delta(before)["padded_executions"] >= 3
    # What relates the sizes is kept beside the programs.
    assert len(cross.compiled) >= 2 and cross.compiled.keys() < kept.keys()


@pytest.mark.parametrize(
    "length, pads, name", [(256, False, "pallas"), (256, True, "plain"), (16384, True, "pallas")]
)
def test_kernel_of_a_length(length: int, pads: bool, name: str) -> None:
    """Scores that would fill the memory are left to the kernel, in programs of their own."""
    x = jax.ShapeDtypeStruct((1, 8, length, 128), np.float32)
    found = KERNEL.select(of_forward(x, x, x), Target("tpu", kind="TPU v5e", pads=pads), None)
    assert found.name == name
