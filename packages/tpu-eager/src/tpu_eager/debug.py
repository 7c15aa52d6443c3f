"""Debug mode: each op runs and is waited for, so that an error is raised at its own line.

Indices out of range, which a program on the device cannot report, are found here. With
``TPU_DEBUG_NANS=1`` so are NaNs and infinities.
"""

from __future__ import annotations

from typing import Any

from tpu_core.config import config
from tpu_core.metrics import METRICS
from tpu_core.modes import Mode
from tpu_core.pjrt.client import fetch
from tpu_core.recorder.host_replay import call_of_last
from tpu_core.verification.finite import error_of_call
from tpu_core.verification.statistics import non_finite
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
        METRICS.debug_check()
        check_finite(segment, inputs, outputs)


def check_finite(segment: Any, inputs: list[Any], outputs: list[Any]) -> None:
    """Raise where an op's result holds a NaN, or an infinity that its arguments do not.

    Args:
        segment, inputs, outputs: As of `inspect`.

    Raises:
        NonFiniteError: Names the op, the kind of value, the range of each argument and the user's
            line.
    """
    for array in outputs:
        host = fetch(array)
        if not any(non_finite(host)):
            continue
        node = segment.nodes[-1]
        error = error_of_call(node.name, node.line, host, call_of_last(segment, inputs))
        if error is not None:
            raise error


DEBUG = Mode("debug", max_ops=1, wait=True, inspect=inspect)
