"""Rules that several ops share."""

from __future__ import annotations

from typing import Any

import numpy as np

from tpu_kernels.ops.registry import Rule

ONE_DEVICE = Rule(
    "The program is for one device: XLA divides no kernel among several.",
    lambda a, target: target.devices == 1,
)
HAS_BFLOAT16 = Rule(
    "The chip is none of TPU v2 and v3, whose matrix units Mosaic gives no bfloat16.",
    lambda a, target: target.kind not in ("TPU v2", "TPU v3"),
)


def common_dtype(*arrays: Any) -> str:
    """The name of the arrays' dtype; ``"mixed"`` where they differ."""
    names = {np.dtype(x.dtype).name for x in arrays}
    return names.pop() if len(names) == 1 else "mixed"
