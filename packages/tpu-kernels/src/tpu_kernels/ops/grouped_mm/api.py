"""The record of grouped products: what leads to them, and their implementations in order."""

from __future__ import annotations

from types import MappingProxyType

from tpu_kernels.ops.grouped_mm.arguments import of_call
from tpu_kernels.ops.grouped_mm.megablox import MEGABLOX
from tpu_kernels.ops.grouped_mm.overloads import GROUPED_MM
from tpu_kernels.ops.grouped_mm.reference import PLAIN
from tpu_kernels.ops.registry import Op

KERNEL = Op(
    "grouped_mm",
    ("torch.nn.functional.grouped_mm",),
    MappingProxyType({GROUPED_MM: of_call}),
    (MEGABLOX, PLAIN),
)
