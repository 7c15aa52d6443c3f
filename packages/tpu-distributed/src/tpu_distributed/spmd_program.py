"""SPMD programs: segments with collectives that the ranks of a group run together.

Before one runs the ranks compare it. Where they differ, each goes on op by op: the collectives
among the ops then are what they are outside of `spmd()`, agreed on one by one, so that ranks may
have cut their programs at different places, or call the same collectives out of the region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tpu_core.extend import Loaded, Node, Program, Segment, obtain_program, runtime
from tpu_distributed import spmd_region
from tpu_distributed.dispatcher import SENDER
from tpu_distributed.flight_records.recorder import RECORDER, Record
from tpu_distributed.rendezvous import Agreement, Rendezvous, fingerprint_of
from tpu_distributed.traced_collectives import NAME, group_of, recorded_of
from tpu_distributed.work import Collective


class _Held:
    """An operand that was computed, see `tpu_distributed.work.Read`."""

    def __init__(self, array: Any, takes: bool) -> None:
        self._array, self._takes = array, takes

    def array(self) -> Any:
        return self._array

    def is_last_use(self) -> bool:
        return self._takes

    def release(self) -> None:
        self._array = None


class _Run:
    """A run of such a program, as a job of `tpu_distributed.dispatcher`."""

    def __init__(self, send: Callable[[], list[Any] | None]) -> None:
        self._send = send
        self.is_sent = False
        self.results: list[Any] | None = None
        self.error: BaseException | None = None

    def send(self) -> list[Any]:
        """Compare it with that of the other ranks, and give it to the device. Raises nothing."""
        try:
            self.results = self._send()
        except BaseException as error:
            self.error = error
        self.is_sent = True
        return self.results or []


class Together:
    """A segment with collectives of one group.

    Args:
        segment: The segment.
        nodes: The collectives among its nodes, in order.
    """

    def __init__(self, segment: Segment, nodes: Sequence[Node]) -> None:
        self._nodes, self._key = nodes, segment.key
        self._calls = [recorded_of(node).call for node in nodes]
        self._ops = described(segment)
        self._device = runtime().client.devices[segment.device]
        constants = repr(segment.constants())
        self._fingerprints = fingerprint_of(segment.text()) | 1, fingerprint_of(constants)
        self._loaded: Loaded = obtain_program(
            runtime(),
            group_of(nodes[0]).devices,
            f"a program with {len(nodes)} collectives",
            segment,
        )

    def execute(self, arrays: Sequence[Any]) -> list[Any] | None:
        """Run it.

        Returns:
            Its results; None where the ranks differ: `program_of` then has another answer.
        """
        client = runtime().client
        given = [client.exact(a, self._device) for a in arrays]
        control = group_of(self._nodes[0]).control
        # Nobody else may call a collective of the group till it is known how many this is.
        with control.order:
            job = _Run(partial(self._send, control, given))
            SENDER.put(job, waits=True)
            SENDER.wait(job)
        if job.error is not None:
            raise job.error
        return job.results

    def _send(self, control: Rendezvous, arrays: list[Any]) -> list[Any] | None:
        first = self._called(control, 0)
        agreement = control.agree_on_program(first, self._fingerprints, self._ops)
        if agreement is not Agreement.ALL:
            control.take_back(first)
            _agreements[self._key] = agreement
            return None
        records = [first, *(self._called(control, i) for i in range(1, len(self._nodes)))]
        results = self._loaded.execute(arrays).consume_with_handlers(self._loaded.handlers)
        for record in records:
            RECORDER.issued(record, results)
        return list(results)

    def _called(self, control: Rendezvous, index: int) -> Record:
        record = control.called(self._calls[index])
        record.line = self._nodes[index].line or record.line
        return record


# By key of a segment, what ranks have just found that they have in common.
_agreements: dict[str, Agreement] = {}


def described(segment: Segment) -> list[str]:
    """Its ops, one by one: ``"aten.mul.Tensor float32[4] at train.py:12"``."""
    texts = []
    for node in segment.nodes:
        name = node.name.removesuffix(".default")
        if node.name == NAME:
            texts.append(f"{recorded_of(node).call} at {node.line}")
            continue
        slots = [segment.slots[i] for i in node.outputs if i is not None]
        shapes = ", ".join(f"{s.dtype}{list(s.shape)}" for s in slots)
        texts.append(f"{name} {shapes} at {node.line}")
    return texts


def program_of(segment: Segment) -> Program | None:
    """Program of a segment for `tpu_core.extend.record_op`."""
    nodes = [node for node in segment.nodes if node.name == NAME]
    agreement = _agreements.pop(segment.key, Agreement.ALL)
    if agreement is Agreement.NOTHING:
        spmd_region.differed()
        return None
    if agreement is Agreement.BUT_CONSTANTS:
        # All are inputs now: `x * rank` has a constant of its own on each rank.
        segment = segment.with_numbers([replace(n, compiled_in=False) for n in segment.numbers])
    execute: Callable[[Sequence[Any]], list[Any] | None]
    if len(segment.nodes) == 1:
        execute = partial(_alone, segment)
    else:
        execute = Together(segment, nodes).execute
    return Program(
        execute,
        None,
        0,
        0,
        f"{segment.key} together",
        len(segment.nodes),
        nodes[0].line,
        [n.compiled_in for n in segment.numbers],
    )


def _alone(segment: Segment, arrays: Sequence[Any]) -> list[Any]:
    """Carry one collective out, as outside of a region."""
    (node,) = segment.nodes
    control, recorded = group_of(node).control, recorded_of(node)
    client = runtime().client
    device = client.devices[segment.device]
    given = {slot: client.exact(a, device) for slot, a in zip(segment.inputs(), arrays)}
    taken = [i for i in segment.donated if node.operands.count(i) == 1]
    operands = [_Held(given[i], i in taken) for i in node.operands]
    with control.order:
        record = control.called(recorded.call)
        record.line = node.line or record.line
        work = Collective((), record, control, recorded.executor(), operands, (), True, None)
        SENDER.put(work, waits=True)
    work.wait(None)
    results = [*work.arrays, client.put(np.zeros((), np.uint8), device)]
    by_slot = dict(zip(node.outputs, results, strict=True))
    return [by_slot[i] for i in segment.live]
