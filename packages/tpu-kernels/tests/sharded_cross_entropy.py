"""Computes the loss of tokens divided over four devices, and compares with PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from tpu_kernels.ops.cross_entropy.arguments import BACKWARD, FORWARD
from tpu_kernels.ops.cross_entropy.chunked import CHUNKED
from tpu_kernels.ops.cross_entropy.pallas import PALLAS

AXES = ("data", "model")
# How hidden states and weights are divided.
WAYS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "tokens": ((AXES,), ()),
    "tokens and vocabulary": (("data",), ("data",)),
    "features": ((None, "model"), (None, "model")),
}


def gradients(functions: Any, bias: Any) -> Callable[..., Any]:
    """Losses, and gradients by hidden states, weights and bias."""

    def run(hidden: Any, weight: Any, target: Any, grad: Any) -> Any:
        options = (hidden, weight, target, bias, 0.0, 0.0, 0)
        losses, sums, slopes = functions[FORWARD](*options, True)
        return losses, slopes * grad[:, None], *functions[BACKWARD](grad, sums, *options)

    return run


def main() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(16, 128).requires_grad_(), torch.randn(40, 128).requires_grad_()
    target, grad, bias = torch.randint(40, (16,)), torch.rand(16), torch.randn(40)
    mesh = jax.make_mesh((2, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for implementation, with_bias in ((CHUNKED, True), (PALLAS, False)):
        logits = F.linear(hidden, weight, bias if with_bias else None)
        losses = F.cross_entropy(logits, target, reduction="none")
        of_cpu = [losses, *torch.autograd.grad(losses, (hidden, weight), grad)]
        function = gradients(implementation.functions, bias.numpy() if with_bias else None)
        for name, specs in WAYS.items():
            placed = [
                jax.device_put(jnp.asarray(x.detach()), NamedSharding(mesh, PartitionSpec(*spec)))
                for x, spec in zip((hidden, weight, target, grad), (*specs, (), ()))
            ]
            division = OperandSharding(AbstractChip().mesh(dict.fromkeys(AXES, 2)))
            with Target("cpu", 4, division=division).applied(), jax.enable_x64(True):
                division.learn(jax.jit(functools.partial(function)).trace(*placed).lower())
                assert division.is_needed
                got = jax.jit(functools.partial(function))(*placed)
            for a, b in zip(got, of_cpu):
                np.testing.assert_allclose(a, b.detach().numpy(), atol=3e-5, rtol=3e-5)
            print(implementation.name, name)


if __name__ == "__main__":
    main()
