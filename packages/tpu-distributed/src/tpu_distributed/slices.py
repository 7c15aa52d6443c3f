"""Collectives of sub-groups on slices where a program must span all chips.

Where routing between chips is limited, libtpu compiles programs for all chips of a slice, or for
one (v5e and v6e, ADR 0016). There a collective of a sub-group is a program of all chips, with
`replica_groups`, and all ranks enter it together, each with the group that it is in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_core.config import config
from tpu_core.errors import ProcessGroupError
from tpu_core.extend import Loaded
from tpu_distributed.executors import OnDevices
from tpu_distributed.flight_records.recorder import Record
from tpu_distributed.rendezvous import Rendezvous

Groups = tuple[tuple[int, ...], ...]

# Kinds of chips that libtpu refuses programs for some of, in slices of more than a host.
_LIMITED = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")
_HOST_CHIPS = 8


@dataclass(frozen=True)
class World:
    """The processes of the default group.

    Attributes:
        control: Agrees with all of them.
        devices: Theirs, by rank.
    """

    control: Rendezvous
    devices: Sequence[Any]


@dataclass(frozen=True)
class Whole:
    """Devices that a sub-group's programs span.

    Attributes:
        world: All chips.
        leader: First rank of the sub-group, which no other of its kind has.
        position: Of this process in the sub-group.
    """

    world: World
    leader: int
    position: int


class _Current:
    world: World | None = None


def entered(control: Rendezvous, devices: Sequence[Any]) -> None:
    """Take note of the default group."""
    _Current.world = World(control, devices)


def whole_of(ranks: Sequence[int], position: int) -> Whole | None:
    """Devices that a sub-group's programs span; None where these are its own.

    Args:
        ranks: Of its processes in the default group.
        position: Of this process among them.
    """
    world = _Current.world
    if world is None or not 1 < len(ranks) < len(world.devices):
        return None
    return Whole(world, ranks[0], position) if must_span(world.devices) else None


def must_span(devices: Sequence[Any]) -> bool:
    """Return whether programs for some of these devices are refused, or are to be taken to be.

    Args:
        devices: JAX devices of all processes.
    """
    wanted = config().collectives_span
    if wanted != "auto":
        return wanted == "slice"
    return len(devices) > _HOST_CHIPS and devices[0].device_kind in _LIMITED


@dataclass(frozen=True)
class OnWholeSlice:
    """A program that all chips run together, each for its group.

    Args:
        whole: Of the sub-group.
        program: Makes it for groups that are a partition of all ranks; is to keep it.
    """

    whole: Whole
    program: Callable[[Groups], Loaded]

    def payload(self, arrays: Sequence[Any]) -> np.ndarray[Any, Any]:
        """Group of this process and its place in it."""
        return np.array([self.whole.leader, self.whole.position], np.int64)

    def run(
        self,
        arrays: Sequence[Any],
        takes: bool,
        payloads: Sequence[np.ndarray[Any, Any]],
        record: Record,
    ) -> list[Any]:
        """Give it to the device; errors as of `groups_of`."""
        program = self.program(groups_of(payloads, record))
        return OnDevices(program).run(arrays, takes, payloads, record)


def groups_of(payloads: Sequence[np.ndarray[Any, Any]], record: Record) -> Groups:
    """The groups that all ranks are in.

    Args:
        payloads: Leader and position of each rank.
        record: Of the call.

    Raises:
        ProcessGroupError: They are no partition into groups of one size; on all ranks.
    """
    members: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, (leader, position) in enumerate(payloads):
        members[int(leader)].append((int(position), rank))
    groups = tuple(tuple(rank for _, rank in sorted(found)) for found in members.values())
    positions = {tuple(place for place, _ in sorted(found)) for found in members.values()}
    if positions != {tuple(range(len(groups[0])))}:
        raise ProcessGroupError(
            "Ranks called a collective of groups that overlap, and on this slice a program spans "
            "all chips.",
            values={"call": record.call, "groups": [list(group) for group in groups]},
            line=record.line,
            remedy="Have all ranks call it in groups of one DeviceMesh axis, or use a group with "
            "backend='gloo' and CPU tensors.",
        )
    return groups
