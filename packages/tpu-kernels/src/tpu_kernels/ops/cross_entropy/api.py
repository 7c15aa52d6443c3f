"""The record of the loss: what leads to it, and its implementations in order."""

from __future__ import annotations

from types import MappingProxyType

from tpu_kernels.ops.cross_entropy.arguments import BACKWARD, FORWARD, of_backward, of_forward
from tpu_kernels.ops.cross_entropy.chunked import CHUNKED
from tpu_kernels.ops.cross_entropy.pallas import PALLAS
from tpu_kernels.ops.cross_entropy.reference import PLAIN
from tpu_kernels.ops.registry import Op

KERNEL = Op(
    "cross_entropy",
    (
        "torch.nn.functional.cross_entropy",
        "torch.nn.CrossEntropyLoss",
        "tpu_kernels.linear_cross_entropy",
    ),
    MappingProxyType({FORWARD: of_forward, BACKWARD: of_backward}),
    (PALLAS, CHUNKED, PLAIN),
)
