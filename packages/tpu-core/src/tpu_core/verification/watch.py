"""Selection of the runs to verify or to check for NaN, and the error where one is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tpu_core import _C, modes
from tpu_core.compiler.segment import Segment
from tpu_core.config import config
from tpu_core.errors import VerificationError
from tpu_core.metrics import METRICS
from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt.padded_array import exact, on_host
from tpu_core.verification.all_finite import all_finite
from tpu_core.verification.finite import error_of_segment
from tpu_core.verification.judge import Difference, difference

if TYPE_CHECKING:
    from tpu_core.compiler.programs import Program


def watch(
    program: Program, segment: Segment, client: pjrt.Client, drop: Callable[[str], None]
) -> Program:
    """A program whose runs are judged as ``TPU_VERIFY`` says.

    Args:
        program: The program.
        segment: The segment that it was made for.
        client: The client that runs it.
        drop: Takes the program of a key out of the cache.

    Returns:
        The program itself where none of its runs is judged.
    """
    which, _, every = config().verify.partition(":")
    if config().debug_nans:
        checked = _CheckedForNaN(program, segment, client)
        program = replace(program, execute=checked, handlers=None)
    if which == "off":
        return program
    judged = _Judged(program, segment, client, drop, int(every or 0))
    return replace(program, execute=judged, handlers=None)


class _Runs:
    """Runs of a program beside the segment that it was made for."""

    def __init__(self, program: Program, segment: Segment, client: pjrt.Client) -> None:
        self._program, self._client = program, client
        self._device = client.devices[segment.device]
        mask = program.compiled_in
        if mask is not None:
            numbers = [
                replace(n, compiled_in=fixed)
                for n, fixed in zip(segment.numbers, mask, strict=True)
            ]
            segment = segment.with_numbers(numbers)
        self._segment: Segment | None = segment

    def _run(self, arguments: list[Any]) -> Sequence[Any] | None:
        p = self._program
        if p.handlers is None:
            return p.execute(arguments)
        exact_ones = [exact(a, self._device) for a in arguments]
        return p.execute(exact_ones).consume_with_handlers(p.handlers)


class _CheckedForNaN(_Runs):
    """Raises where an output of a run is not finite; names the op that made it so."""

    def __call__(self, arguments: list[Any]) -> Sequence[Any] | None:
        segment = self._segment
        if segment is None or modes.active().inspect is not None:  # Debug mode checks each op
            return self._run(arguments)
        results = self._run(arguments)
        if results is None:
            return None
        METRICS.debug_check()
        if all_finite(results, segment.device, self._client):
            return results
        # None was donated (`tpu_core.tiers.choose`).
        slots = segment.inputs()
        inputs = [_fetch(a) for a in arguments[: len(slots)]]
        numbers = _numbers(segment, arguments[len(slots) :])
        error = error_of_segment(segment, inputs, numbers, [_fetch(r) for r in results])
        if error is not None:
            raise error
        return results


class _Judged(_Runs):
    """Runs a program, and judges its first run or one in so many.

    Args:
        every: A run in so many is judged; 0 for the first alone.
    """

    def __init__(
        self,
        program: Program,
        segment: Segment,
        client: pjrt.Client,
        drop: Callable[[str], None],
        every: int,
    ) -> None:
        super().__init__(program, segment, client)
        self._drop, self._every = drop, every
        self._runs = 0

    def __call__(self, arguments: list[Any]) -> Sequence[Any] | None:
        segment = self._segment
        if segment is None or (self._every and self._runs % self._every):
            self._runs += 1
            return self._run(arguments)
        # Before the run, which may take the memory of its inputs.
        count = len(segment.inputs())
        inputs = [_fetch(a) for a in arguments[:count]]
        numbers = _numbers(segment, arguments[count:])
        results = self._run(arguments)
        if results is None:  # another program is to take its place
            return None
        self._runs += 1
        found = [pjrt.fetch(on_host(r)) for r in results]
        METRICS.verification()
        off = difference(segment, inputs, numbers, found)
        if off is not None:
            self._drop(self._program.key)
            raise _error(segment, off)
        if not self._every:
            self._segment = None
        return results


def _fetch(array: Any) -> torch.Tensor:
    """A copy on the host, which later runs leave as it is."""
    return pjrt.fetch(on_host(array)).clone()


def _numbers(segment: Segment, packs: Sequence[Any]) -> list[float | int]:
    """The segment's numbers in a run, from its packed arguments."""
    packed = {k: iter(np.asarray(a)) for (k, _), a in zip(segment.packs(), packs)}
    return [n.value if n.compiled_in else next(packed[n.pack]).item() for n in segment.numbers]


def _error(segment: Segment, off: Difference) -> VerificationError:
    node = next(n for n in segment.nodes if off.slot in n.outputs)
    slot = segment.slots[off.slot]
    _C.clear_programs()
    return VerificationError(
        f"A program of {len(segment.nodes)} ops gave another result for {node.name} than its ops "
        "do one by one.",
        values={
            "result": f"{slot.dtype}{list(slot.shape)}",
            "element": str(list(off.index)),
            "of the program": f"{off.found:.9g}",
            "op by op": f"{off.expected:.9g}",
            "rounding explains": f"{off.allowed:.3g}",
            "elements that are off": off.elements,
        },
        line=node.line or None,
    )
