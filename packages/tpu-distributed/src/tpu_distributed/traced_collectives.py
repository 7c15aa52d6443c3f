"""Traced collectives: ops that become part of the surrounding program."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import torch

from tpu_core.extend import DeviceValue, Node, flush, inlined, record_op, register, to_numpy_dtype
from tpu_distributed.executors import CollectiveExecutor
from tpu_distributed.rendezvous import CollectiveCall

if TYPE_CHECKING:
    from tpu_distributed.group import Group

NAME = "tpu_distributed.collective.default"

# By label: the ops of a program refer to their group by that, and find the one that has it now.
GROUPS: WeakValueDictionary[str, Group] = WeakValueDictionary()


@dataclass(frozen=True)
class TracedCollective:
    """A collective as an op.

    Attributes:
        call: The call for the preflight check, where it is executed by itself.
        text: Its program.
        outputs: Shape and dtype of each result.
        executor: Gives the executor for it by itself.
    """

    call: CollectiveCall
    text: str
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    executor: Callable[[], CollectiveExecutor]


# By text and label of the group, by which a recorded op refers to them.
_RECORDED: dict[tuple[str, str], TracedCollective] = {}
# One result of each collective whose program may not have run yet. A program that nobody reads is
# dropped, and one with a collective must not be: the other ranks may not drop theirs.
_kept: list[torch.Tensor] = []
_kept_lock = threading.Lock()


def record(
    group: Group,
    what: TracedCollective,
    inputs: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
) -> None:
    """Record a collective.

    Args:
        group: Group of its ranks.
        what: The collective.
        inputs: Its operands.
        written: Tensors that get the first results.
    """
    _define()
    label = group.control.label
    _RECORDED[what.text, label] = what
    with torch.no_grad():
        operands = [_whole(x.detach()) for x in inputs]
        *results, mark = torch.ops.tpu_distributed.collective(operands, what.text, label)
        for tensor, result in zip(written, results):
            tensor.detach().copy_(result)
    with _kept_lock:
        _kept.append(mark)
    STALLS.watch()


def recorded_of(node: Node) -> TracedCollective:
    """The collective of a recorded op."""
    assert node.plan is not None
    return _RECORDED[node.plan.argument("program"), node.plan.argument("group")]


def group_of(node: Node) -> Group:
    """The group that a recorded op is of."""
    assert node.plan is not None
    return GROUPS[node.plan.argument("group")]


def run_recorded() -> None:
    """Run the programs that collectives were recorded in."""
    if not _kept:
        return
    _drop_run()
    if _kept:
        flush(-1, "collective")
        _drop_run()


def forget(group: Group) -> None:
    """Keep nothing of a group that has ended, once what was recorded has run."""
    label = group.control.label
    if GROUPS.get(label) is group:
        for key in [key for key in _RECORDED if key[1] == label]:
            del _RECORDED[key]


class Stalls:
    """Runs recorded collectives of a process that has stopped to record.

    Where ranks differ, one may wait for another that waits for it by other means, a collective of
    CPU tensors say, and would run what it recorded only after that.

    Attributes:
        seconds: Time without a recorded op after which that happens, at the latest after
            twice as much.
    """

    seconds = 10.0

    def __init__(self) -> None:
        self._has_recorded = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Collectives were recorded."""
        self._has_recorded.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tpu stalls", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._has_recorded.wait()
            metrics: Callable[[], dict[str, float]] = torch.get_device_module("tpu").metrics
            before = metrics()["ops"]
            time.sleep(self.seconds)
            self._has_recorded.clear()
            if metrics()["ops"] != before:
                self._has_recorded.set()
                continue
            with contextlib.suppress(Exception):  # raised where the results are read
                run_recorded()


STALLS = Stalls()


def _drop_run() -> None:
    with _kept_lock:
        _kept[:] = [mark for mark in _kept if DeviceValue(mark).state in ("pending", "running")]


def _whole(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, whose storage holds its elements and no others."""
    if x.is_conj() or x.is_neg() or not DeviceValue(x).is_whole:
        return x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return x


@functools.cache
def _define() -> None:
    from tpu_distributed import spmd_program

    library = torch.library.Library("tpu_distributed", "DEF")
    library.define("collective(Tensor[] inputs, str program, str group) -> Tensor[]")
    library.impl("collective", _meta, "Meta")
    _libraries.append(library)
    register(NAME, _lower)
    record_op(
        "tpu_distributed::collective", is_differentiable=False, spanning=spmd_program.program_of
    )


_libraries: list[torch.library.Library] = []  # an op ends with its library


def _lower(inputs: Sequence[jax.Array], program: str, group: str) -> list[jax.Array]:
    outputs = [(s, to_numpy_dtype(dtype)) for s, dtype in _RECORDED[program, group].outputs]
    return [*inlined(program, inputs, outputs), jnp.zeros((), jnp.uint8)]


def _meta(inputs: Sequence[torch.Tensor], program: str, group: str) -> list[torch.Tensor]:
    outputs = _RECORDED[program, group].outputs
    made = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in outputs]
    return [*made, torch.empty((), dtype=torch.uint8, device="meta")]
