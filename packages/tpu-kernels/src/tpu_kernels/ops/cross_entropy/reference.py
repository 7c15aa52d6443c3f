"""The loss by logits that are built, as PyTorch does."""

from __future__ import annotations

from types import MappingProxyType

from jax import Array

from tpu_core.array_types import Float, Int
from tpu_kernels.ops.cross_entropy import loops
from tpu_kernels.ops.cross_entropy.arguments import BACKWARD, FORWARD
from tpu_kernels.ops.registry import Implementation


def forward(
    hidden: Float[Array, "tokens features"],
    weight: Float[Array, "vocabulary features"],
    target: Int[Array, " tokens"],
    bias: Float[Array, " vocabulary"] | None,
    smoothing: float,
    softcap: float,
    chunk: int,
    slopes: bool,
) -> tuple[Float[Array, " tokens"], Float[Array, " tokens"], Float[Array, "_ features"]]:
    """As `tpu_kernels.ops.cross_entropy.loops.forward`, all columns at once."""
    options = (smoothing, softcap, weight.shape[0], slopes)
    return loops.forward(hidden, weight, target, bias, *options)


def backward(
    grad: Float[Array, " tokens"],
    logsumexp: Float[Array, " tokens"],
    hidden: Float[Array, "tokens features"],
    weight: Float[Array, "vocabulary features"],
    target: Int[Array, " tokens"],
    bias: Float[Array, " vocabulary"] | None,
    smoothing: float,
    softcap: float,
    chunk: int,
) -> tuple[Float[Array, "vocabulary features"], Float[Array, " _"]]:
    """As `tpu_kernels.ops.cross_entropy.loops.backward`, all columns at once."""
    options = (smoothing, softcap, weight.shape[0])
    return loops.backward(grad, logsumexp, hidden, weight, target, bias, *options)


PLAIN = Implementation(
    "plain",
    "Builds the logits. Where a model's loss would lead here by itself, it is left as it was "
    "written.",
    functions=MappingProxyType({FORWARD: forward, BACKWARD: backward}),
)
