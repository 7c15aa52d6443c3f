"""The loss of a model as it is written, for `tpu_compile` to take in its place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpu_core.extend import KernelSelection
from tpu_kernels.cross_entropy import wide_linear_cross_entropy

# Elements of the logits from which on they are not built. Computing them twice takes a third more
# time in the matrix unit; what it saves is memory, and below half a gigabyte that is little.
LEAST = 2**28


class Loss:
    """See `tpu_compile.linear_loss.LinearLoss`."""

    def refused(
        self,
        tokens: int,
        features: int,
        vocabulary: int,
        dtype: torch.dtype,
        devices: int,
        axes: Sequence[str],
    ) -> str | None:
        """Reason to build logits for a loss of these sizes, or None."""
        chosen = KernelSelection.named().get("cross_entropy")
        if chosen == "plain":
            return "the implementation 'plain' of cross_entropy is named"
        if axes:
            return f"the weights are divided over {', '.join(axes)}, which the batch is not"
        if chosen is None and tokens * vocabulary // devices < LEAST:
            return f"they have fewer than {LEAST:,} elements on a device"
        return None

    __call__ = staticmethod(wide_linear_cross_entropy)


LOSS = Loss()
