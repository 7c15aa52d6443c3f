"""The record of attention: what leads to it, and its implementations in order."""

from __future__ import annotations

from types import MappingProxyType

from tpu_kernels.ops.attention.arguments import AttentionArguments, of_backward, of_forward
from tpu_kernels.ops.attention.flash import FLASH
from tpu_kernels.ops.attention.overloads import BACKWARD, FORWARD
from tpu_kernels.ops.registry import Implementation, Op

PLAIN = Implementation(
    "plain",
    "`tpu_core.lowering.attention`: builds the scores, so that memory grows with the product of "
    "the lengths.",
)
# Bytes of float32 scores that programs on padded arrays may build; longer sequences are programs
# of their own, by the kernel.
_MOST_SCORES = 2**29


def _is_small(arguments: AttentionArguments) -> bool:
    batch, heads, queries, _ = arguments.query
    return bool(4 * batch * heads * queries * arguments.key[2] <= _MOST_SCORES)


KERNEL = Op(
    "attention",
    ("torch.nn.functional.scaled_dot_product_attention", "torch.nn.MultiheadAttention"),
    MappingProxyType({FORWARD: of_forward, BACKWARD: of_backward}),
    (FLASH, PLAIN),
    _is_small,
)
