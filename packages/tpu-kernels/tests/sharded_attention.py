"""Computes attention divided over four devices in several ways, and compares with PyTorch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding, PartitionSpec

from tpu_core.lowering.implementations import Target
from tpu_core.lowering.operand_sharding import OperandSharding
from tpu_core.pjrt.chips import AbstractChip
from tpu_kernels.ops.attention.flash import backward, forward

AXES = ("data", "model")
# How queries are divided: batches, heads, length.
WAYS: dict[str, tuple[Any, ...]] = {
    "batches": (AXES,),
    "batches and heads": ("data", "model"),
    "lengths": (None, None, "data"),
}


def both(q: Any, k: Any, v: Any, grad: Any, bias: Any) -> tuple[Any, ...]:
    """Output and gradients."""
    out = forward(q, k, v, bias, 0.0, True)
    wanted = [True, True, True, False]
    rest = (None, None, 0, 0, 0.0, True, out[6], out[7])
    return out[0], *backward(grad, q, k, v, bias, wanted, out[0], out[1], *rest)[:3]


def main() -> None:
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(4, h, 40, 16) for h in (4, 2, 2, 4))
    mask = torch.rand(4, 1, 40, 40) < 0.7
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = F.scaled_dot_product_attention(
        *leaves, attn_mask=mask & torch.ones(40, 40).tril().bool(), enable_gqa=True
    )
    expected = [out, *torch.autograd.grad(out, leaves, grad)]
    arrays = [jnp.asarray(x.detach().numpy()) for x in (query, key, value, grad, mask)]
    mesh = jax.make_mesh((2, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for name, spec in WAYS.items():
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        placed = [jax.device_put(arrays[0], sharding), *arrays[1:]]
        division = OperandSharding(AbstractChip().mesh(dict.fromkeys(AXES, 2)))
        with Target("cpu", 4, division=division).applied(), jax.enable_x64(True):
            division.learn(jax.jit(lambda *a: both(*a)).trace(*placed).lower())
            assert division.is_needed
            got = jax.jit(lambda *a: both(*a))(*placed)
        for a, b in zip(got, expected):
            np.testing.assert_allclose(a, b.detach().numpy(), atol=2e-5, rtol=2e-5)
        print(f"attention, {name}")
