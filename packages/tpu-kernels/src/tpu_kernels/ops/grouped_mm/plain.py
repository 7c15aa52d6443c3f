"""Grouped products as XLA computes them."""

from __future__ import annotations

from tpu_kernels.ops.registry import Implementation

PLAIN = Implementation(
    "plain",
    "`tpu_core.lowering.grouped_mm`: for rows in groups libtpu's own kernel, on a CPU a loop over "
    "blocks of rows. Where both operands have two dimensions a TPU multiplies all rows for each "
    "group.",
)
