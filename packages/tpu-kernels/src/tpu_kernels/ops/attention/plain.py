"""Attention as products and a softmax, which XLA fuses."""

from __future__ import annotations

from tpu_kernels.ops.registry import Implementation

PLAIN = Implementation(
    "plain",
    "`tpu_core.lowering.attention`: builds the scores, so that memory grows with the product of "
    "the lengths.",
)
