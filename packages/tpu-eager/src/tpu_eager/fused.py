"""Fused mode: ops are recorded and a whole segment, at best a training step, runs as one program.

Segments end at host reads, after each optimizer step and at ``TPU_SEGMENT_OPS`` ops.
"""

from __future__ import annotations

from tpu_core.modes import Mode

FUSED = Mode("fused", max_ops=None, cut_after_optimizer_step=True, pads=True)
