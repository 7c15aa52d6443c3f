"""The record of paged attention."""

from __future__ import annotations

from types import MappingProxyType

from tpu_kernels.ops.paged_attention.arguments import OVERLOAD, bind
from tpu_kernels.ops.paged_attention.pallas import PALLAS
from tpu_kernels.ops.paged_attention.reference import PLAIN
from tpu_kernels.ops.registry import Op

KERNEL = Op(
    "paged_attention",
    ("tpu_kernels.paged_attention",),
    MappingProxyType({OVERLOAD: bind}),
    (PALLAS, PLAIN),
)
