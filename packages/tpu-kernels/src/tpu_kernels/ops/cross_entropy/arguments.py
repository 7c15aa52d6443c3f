"""The arguments of the loss, as far as rules ask about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpu_kernels.ops.rules import common_dtype

# The overloads of the loss of a linear layer's logits.
FORWARD = "tpu_kernels.linear_cross_entropy.default"
BACKWARD = "tpu_kernels.linear_cross_entropy_backward.default"


@dataclass(frozen=True, slots=True)
class LossArguments:
    """A call of the loss of a linear layer's logits.

    Attributes:
        tokens, features, vocabulary: Sizes.
        dtype: Of hidden states and weights; ``"mixed"`` where they differ.
        bias: Whether the layer has one.
        smoothing: Of the labels.
        chunk: Columns of logits at a time, 0 where it is left to the implementation.
    """

    tokens: int
    features: int
    vocabulary: int
    dtype: str
    bias: bool
    smoothing: float
    chunk: int

    def describe(self) -> dict[str, object]:
        """See `tpu_kernels.ops.registry.Arguments`."""
        return {
            "hidden": f"{self.dtype}{[self.tokens, self.features]}",
            "weight": [self.vocabulary, self.features],
            "bias": self.bias,
            "label_smoothing": self.smoothing,
            "chunk": self.chunk or "not given",
        }


def of_forward(
    hidden: Any,
    weight: Any,
    target: Any,
    bias: Any,
    smoothing: float,
    softcap: float,
    chunk: int,
    slopes: bool,
) -> LossArguments:
    """From those of ``linear_cross_entropy``."""
    tokens, features = hidden.shape
    return LossArguments(
        tokens,
        features,
        weight.shape[0],
        common_dtype(hidden, weight),
        bias is not None,
        smoothing,
        chunk,
    )


def of_backward(
    grad: Any,
    logsumexp: Any,
    hidden: Any,
    weight: Any,
    target: Any,
    bias: Any,
    smoothing: float,
    softcap: float,
    chunk: int,
) -> LossArguments:
    """From those of ``linear_cross_entropy_backward``."""
    return of_forward(hidden, weight, target, bias, smoothing, softcap, chunk, slopes=True)
