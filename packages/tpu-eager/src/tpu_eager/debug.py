"""Debug mode: each op runs and is waited for, so that an error is raised at its own line.

Indices out of range, which a program on the device cannot report, are found here. With
``TPU_DEBUG_NANS=1`` so are NaNs and infinities.
"""

from __future__ import annotations

from typing import Any

from tpu_core.config import config
from tpu_core.extend import ExecutedOp, Mode
from tpu_eager.indices import check_indices


def inspect(segment: Any, inputs: list[Any], outputs: list[Any]) -> None:
    """Check an op that ran.

    Args:
        segment: The segment of the one op.
        inputs: Arrays of its input slots.
        outputs: Arrays of its live slots.

    Raises:
        IndexError: An index is out of range.
        NonFiniteError: A result is not finite, and ``TPU_DEBUG_NANS`` asks for that.
    """
    check_indices(segment, inputs)
    if config().debug_nans:
        ExecutedOp(segment, inputs).check_finite(outputs)


DEBUG = Mode("debug", max_ops=1, wait=True, inspect=inspect)
