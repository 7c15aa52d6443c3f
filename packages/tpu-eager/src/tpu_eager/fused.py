"""Fused mode: ops are recorded and a whole segment, at best a training step, runs as one program.

Segments end at host reads and after each optimizer step. A loop that has neither is cut where it
repeats, and what does not repeat at ``TPU_SEGMENT_OPS`` ops.
"""

from __future__ import annotations

from tpu_core.extend import Mode

FUSED = Mode(
    "fused",
    max_ops=None,
    cut_after_optimizer_step=True,
    cut_at_repetitions=True,
    pads=True,
    compiles_in_background=True,
)
