"""``tpu::recompute``: where `torch.utils.checkpoint` begins and ends to recompute."""

from __future__ import annotations

import jax

from tpu_core.lowering.registry import lowering


@lowering("tpu.recompute.default")
def recompute(self: jax.Array, begin: bool) -> jax.Array:
    """The marker itself; `tpu_core.compiler.recomputation` acts on it."""
    return self
