"""The record of grouped products: what leads to them, and their implementations in order."""

from __future__ import annotations

from types import MappingProxyType

from tpu_kernels.ops.grouped_mm.arguments import GROUPED_MM, of_call
from tpu_kernels.ops.grouped_mm.megablox import MEGABLOX
from tpu_kernels.ops.registry import Implementation, Op

PLAIN = Implementation(
    "plain",
    "`tpu_core.lowering.grouped_mm`: for rows in groups libtpu's own kernel, on a CPU a loop over "
    "blocks of rows. Where both operands have two dimensions a TPU multiplies all rows for each "
    "group.",
)
KERNEL = Op(
    "grouped_mm",
    ("torch.nn.functional.grouped_mm",),
    MappingProxyType({GROUPED_MM: of_call}),
    (MEGABLOX, PLAIN),
)
