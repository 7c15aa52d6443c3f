"""An op that has run as a segment of its own, to be checked on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpu_core.compiler.segment import Segment
from tpu_core.metrics import METRICS
from tpu_core.pjrt import client as pjrt
from tpu_core.verification.finite import error_of_call
from tpu_core.verification.host_call import HostCall, call_of, zeros
from tpu_core.verification.statistics import non_finite


class ExecutedOp:
    """An op that has run as a segment of its own, as ``Mode.inspect`` is called with it.

    Args:
        segment: A segment of one op.
        inputs: Arrays of its input slots.

    Example:
        >>> def inspect(segment, inputs, outputs):
        ...     ExecutedOp(segment, inputs).check_finite(outputs)
        >>> mode = Mode("checked", max_ops=1, wait=True, inspect=inspect)
    """

    def __init__(self, segment: Segment, inputs: Sequence[Any]) -> None:
        self._segment, self._inputs = segment, inputs

    def call(self) -> HostCall | None:
        """The call with CPU tensors, or None where there is no functional overload.

        Returns:
            An object with ``arguments``, by name, and ``run()``, which calls CPU kernels: they
            raise PyTorch's errors.
        """
        segment = self._segment
        *before, node = segment.nodes
        values = {i: pjrt.fetch(a) for i, a in zip(segment.inputs(), self._inputs)}
        for other in before:
            if other.plan is not None:
                raise ValueError("ExecutedOp takes a segment of one op.")
            for slot in other.outputs:  # uninitialised memory, which reads as zeros
                assert slot is not None
                values[slot] = zeros(segment.slots[slot].shape, segment.slots[slot].dtype)
        numbers = [n.value for n in segment.numbers[node.numbers :]]
        return call_of(node, [values[i] for i in node.operands], numbers)

    def check_finite(self, outputs: Sequence[Any]) -> None:
        """Raise where the op made a NaN, or an infinity that it was not given.

        Args:
            outputs: Arrays of the segment's live slots.

        Raises:
            NonFiniteError: Names the op, the kind of value, the range of each argument and the
                user's line.
        """
        METRICS.debug_check()
        for array in outputs:
            host = pjrt.fetch(array)
            if not any(non_finite(host)):
                continue
            node = self._segment.nodes[-1]
            error = error_of_call(node.name, node.line, host, self.call())
            if error is not None:
                raise error
