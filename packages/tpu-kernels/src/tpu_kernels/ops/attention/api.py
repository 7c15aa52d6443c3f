"""The record of attention: what leads to it, and its implementations in order."""

from __future__ import annotations

from types import MappingProxyType

from tpu_kernels.ops.attention.arguments import of_backward, of_forward
from tpu_kernels.ops.attention.flash import FLASH
from tpu_kernels.ops.attention.overloads import BACKWARD, FORWARD
from tpu_kernels.ops.registry import Implementation, Op

PLAIN = Implementation(
    "plain",
    "`tpu_core.lowering.attention`: builds the scores, so that memory grows with the product of "
    "the lengths.",
)
KERNEL = Op(
    "attention",
    ("torch.nn.functional.scaled_dot_product_attention", "torch.nn.MultiheadAttention"),
    MappingProxyType({FORWARD: of_forward, BACKWARD: of_backward}),
    (FLASH, PLAIN),
)
