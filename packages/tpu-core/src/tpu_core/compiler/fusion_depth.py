"""A bound on how many dependent ops XLA may fuse into one kernel.

XLA:CPU fuses a chain of any length, and emits its kernel by recursion: 400 transposes in a row
overflow the stack, which ends the process, and 100 times ``x - x.sum()`` take as long to compile as
5,000 additions.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

# Chains of pointwise ops this long gain nothing more by fusion.
MOST_DEPENDENT_OPS = 32
# Nothing is fused through these, so that training steps need no barriers.
_NEVER_FUSED = frozenset(
    "mm addmm bmm baddbmm linear convolution convolution_overrideable convolution_backward "
    "convolution_backward_overrideable _scaled_dot_product_fused_attention_overrideable "
    "_scaled_dot_product_fused_attention_overrideable_backward".split()
)


class FusionDepths:
    """Number of consecutive ops that each value of a segment depends on, since the last barrier."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}

    def bound(
        self, op: str, operands: list[int], outputs: Sequence[int], values: dict[int, jax.Array]
    ) -> None:
        """Put what an op made behind a barrier where the chain that leads to it is too long.

        Args:
            op: Name of the op, ``"aten.mm.default"``.
            operands, outputs: Its slots.
            values: Values by slot, changed in place.
        """
        depth = 1 + max((self._of.get(i, 0) for i in operands), default=0)
        if op.split(".")[1] in _NEVER_FUSED:
            depth = 0
        elif depth >= MOST_DEPENDENT_OPS:
            behind = jax.lax.optimization_barrier([values[i] for i in outputs])
            values.update(zip(outputs, behind))
            depth = 0
        for i in outputs:
            self._of[i] = depth
