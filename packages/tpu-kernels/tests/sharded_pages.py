"""Computes attention over pages divided over four devices, and compares with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

import ragged_reference
import test_paged_attention as decoding
import test_ragged_paged_attention_kernel as ragged
from tpu_core.lowering.implementations import Target
from tpu_core.lowering.operand_sharding import OperandSharding
from tpu_core.pjrt.chips import AbstractChip
from tpu_kernels.ops.paged_attention.pallas import paged_attention
from tpu_kernels.ops.ragged_paged_attention.pallas import ragged_paged_attention

AXES = ("data", "model")
Spec = tuple[Any, ...]


def compare(
    name: str,
    function: Callable[..., Any],
    arguments: list[torch.Tensor],
    specs: tuple[Spec, ...],
    wanted: torch.Tensor,
) -> None:
    """Compute the function of arguments that are divided by ``specs``, and compare the result."""
    arrays = [
        jnp.asarray(x.float().numpy(), jnp.bfloat16)
        if x.is_floating_point()
        else jnp.asarray(x.numpy().astype(np.int32))
        for x in arguments
    ]
    mesh = jax.make_mesh((2, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placed = [
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        for x, spec in zip(arrays, specs)
    ]
    division = OperandSharding(AbstractChip().mesh(dict.fromkeys(AXES, 2)))
    with Target("cpu", 4, kind="TPU v5e", division=division).applied(), jax.enable_x64(True):
        division.learn(jax.jit(lambda *a: function(*a)).trace(*placed).lower())
        assert division.is_needed
        program = jax.jit(lambda *a: function(*a)).lower(*placed).compile()
    assert "all-gather" not in program.as_text()  # each device has what it needs
    got = np.asarray(program(*placed), np.float64)
    # Shares of keys, and results, are rounded to bfloat16.
    np.testing.assert_allclose(got, wanted, atol=2e-2, rtol=2e-2)
    print(name)


def main() -> None:
    torch.manual_seed(0)
    arguments = decoding.call(4, 2, 128, 16, torch.bfloat16)
    compare(
        "paged attention, sequences and heads",
        lambda *a: paged_attention(*a, 0.1, 3.0),
        arguments,
        (AXES, ("model",), ("model",), ("data",), ("data",)),
        decoding.expected(arguments, 0.1, 3.0),
    )
    arguments = ragged.call(4, 2)
    with mock.patch.object(pltpu, "store", ragged.masked_store):
        compare(
            "ragged paged attention, heads",
            lambda *a: ragged_paged_attention(*a, jnp.asarray([5], jnp.int32), 0.1, 5.0, 9),
            arguments,
            ((None, "model"), (None, None, "model"), (), (), ()),
            ragged_reference.expected(arguments, 5, 0.1, 5.0, 9),
        )
