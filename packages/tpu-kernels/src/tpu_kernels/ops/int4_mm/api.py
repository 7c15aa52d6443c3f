"""The record of products with weights of 4 bits."""

from __future__ import annotations

from types import MappingProxyType

from tpu_kernels.ops.int4_mm.arguments import OF_CUDA, PACKED, of_call
from tpu_kernels.ops.int4_mm.pallas import PALLAS
from tpu_kernels.ops.int4_mm.reference import PLAIN
from tpu_kernels.ops.registry import Op

KERNEL = Op(
    "int4_mm",
    ("tpu_kernels.int4_mm", "torch.ops.aten._weight_int4pack_mm"),
    MappingProxyType({PACKED: of_call, OF_CUDA: of_call}),
    (PALLAS, PLAIN),
)
