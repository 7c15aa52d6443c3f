"""The loss by logits that are built, as PyTorch does."""

from __future__ import annotations

from types import MappingProxyType

import jax

from tpu_kernels.ops.cross_entropy import loops
from tpu_kernels.ops.cross_entropy.arguments import BACKWARD, FORWARD
from tpu_kernels.ops.registry import Implementation


def forward(
    hidden: jax.Array,
    weight: jax.Array,
    target: jax.Array,
    bias: jax.Array | None,
    smoothing: float,
    softcap: float,
    chunk: int,
    slopes: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `tpu_kernels.ops.cross_entropy.loops.forward`, all columns at once."""
    options = (smoothing, softcap, weight.shape[0], slopes)
    return loops.forward(hidden, weight, target, bias, *options)


def backward(
    grad: jax.Array,
    logsumexp: jax.Array,
    hidden: jax.Array,
    weight: jax.Array,
    target: jax.Array,
    bias: jax.Array | None,
    smoothing: float,
    softcap: float,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """As `tpu_kernels.ops.cross_entropy.loops.backward`, all columns at once."""
    options = (smoothing, softcap, weight.shape[0])
    return loops.backward(grad, logsumexp, hidden, weight, target, bias, *options)


PLAIN = Implementation(
    "plain",
    "Builds the logits. Where a model's loss would lead here by itself, it is left as it was "
    "written.",
    functions=MappingProxyType({FORWARD: forward, BACKWARD: backward}),
)
