"""Parts of segments that CPU kernels run: each of their forms would be a program to compile."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tpu_core import interruptible
from tpu_core.compiler.programs import Program
from tpu_core.compiler.providers import ProgramProvider, ProgramRequest
from tpu_core.compiler.replay import is_cpu_op, replay
from tpu_core.compiler.segment import Node, Segment
from tpu_core.config import config
from tpu_core.metrics import METRICS
from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt.padded_array import on_host

if TYPE_CHECKING:
    from tpu_core.compiler.context import BuildContext

# Ops whose kernels take long on a host: products of matrices, convolutions, attention.
_HEAVY = re.compile(r"\w*mm|mv|matmul|linear|dot|einsum|conv\w*|attention|cdist|cholesky")

logger = logging.getLogger("tpu_core")

_MOST_REFUSED = 4_096  # parts that CPU kernels do not run
_MOST_BYTES = 1 << 30  # that a part reads, copied to the host in each run


def may_run_on_host(node: Node, products: bool = False) -> bool:
    """Return whether a node may run by a CPU kernel: PyTorch has one, and it is no product.

    Args:
        node: The node.
        products: Whether products may, as those of a few elements.
    """
    if config().fallback == "error":
        return False
    plan = node.plan
    if plan is None:
        return True
    words = re.split(r"[._]", f"{plan.compute.op}.{plan.op}")
    return is_cpu_op(plan) and (products or not any(map(_HEAVY.fullmatch, words)))


class HostPart:
    """Runs a segment by CPU kernels, as a program does: from arrays to arrays.

    Args:
        segment: The part.
        device: Device of its results.
        refuse: Called where a kernel refuses, as an index that is out of range.
    """

    def __init__(self, segment: Segment, device: Any, refuse: Callable[[], None]) -> None:
        self._segment = segment.with_numbers(
            [replace(n, compiled_in=False) for n in segment.numbers]
        )
        self._device, self._refuse = device, refuse

    def __call__(self, arguments: list[Any]) -> list[Any] | None:
        """Results for inputs and packed numbers; None where a program is to take its place."""
        s = self._segment
        started = time.perf_counter()
        count = len(s.inputs())
        inputs = [pjrt.fetch(on_host(a)) for a in arguments[:count]]
        try:
            results = replay(s, inputs, _numbers(s, arguments[count:]), lowers=False)
        except Exception as error:  # a program says the same in its own way and time
            interruptible.pass_on(error)
            logger.debug("not on the host: %s", error)
            self._refuse()
            return None
        # A result may be a view of an input, whose memory is the device's.
        arrays = [pjrt.put_tensor(r.clone().contiguous(), self._device) for r in results]
        line = next((n.line for n in s.nodes if n.line), None)
        METRICS.host_part(line, time.perf_counter() - started)
        return arrays


class HostKernels(ProgramProvider):
    """CPU kernels as the programs of the parts that a provider gives to them."""

    def __init__(self, context: BuildContext) -> None:
        self._context = context
        self._refused: set[str] = set()

    def provide(self, request: ProgramRequest) -> Program | None:
        """CPU kernels for a part; None where they are not to run it."""
        s = request.segment
        if not s.on_host or s.key in self._refused or not is_small(s):
            return None

        def refuse() -> None:
            if len(self._refused) >= _MOST_REFUSED:
                self._refused.clear()
            self._refused.add(s.key)

        return Program(
            HostPart(s, self._context.client.devices[s.device], refuse),
            None,
            0,
            0,
            f"host {s.key}",
            len(s.nodes),
            s.last_line or "",
            [False] * len(s.numbers),
            on_host=True,
        )


def is_small(segment: Segment) -> bool:
    """Return whether a part reads few enough bytes to be copied to the host in each run."""
    return sum(segment.slots[i].nbytes for i in segment.inputs()) <= _MOST_BYTES


def _numbers(segment: Segment, packs: Sequence[Any]) -> list[float | int]:
    packed = {k: iter(np.asarray(a)) for (k, _), a in zip(segment.packs(), packs)}
    return [next(packed[n.pack]).item() for n in segment.numbers]
