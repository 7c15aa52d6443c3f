"""The layout of a TPU slice: chips on hosts.

The hosts are those of Google Cloud's machine types (``ct5lp-hightpu-1t``, ``-4t``, ``-8t`` and
their like). None was launched on hardware yet.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tpu_core.errors import UnknownTopologyError

Shape = tuple[int, int, int]

# Chips of a host within a larger slice, and slices that are one host. In generations with two
# devices a chip (v2, v3, tpu7x) a process cannot be given one device.
_HOST: Shape = (2, 2, 1)
_ONE_HOST: dict[str, tuple[Shape, ...]] = {
    "v4": ((2, 2, 1),),
    "v5p": ((2, 2, 1),),
    "v5e": ((1, 1, 1), (2, 2, 1), (2, 4, 1)),
    "v6e": ((1, 1, 1), (2, 2, 1), (2, 4, 1)),
}
_DIMS = {"v4": 3, "v5p": 3, "v5e": 2, "v6e": 2}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "trillium": "v6e"}


@dataclass(frozen=True)
class Slice:
    """A slice of TPUs.

    Attributes:
        shape: Chips along each dimension.
        host: Chips of one host.
    """

    shape: Shape
    host: Shape

    @property
    def chips_per_host(self) -> int:
        """Number of chips, and of processes, of a host."""
        return math.prod(self.host)

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return math.prod(self.shape) // self.chips_per_host


def parse(name: str) -> Slice:
    """The slice that a name stands for.

    Args:
        name: Generation, colon, chips along each dimension: ``"v5p:2x2x2"``, ``"v6e:4x4"``.

    Raises:
        UnknownTopologyError: There is no such slice, or its generation has two devices a chip.

    Example:
        >>> parse("v5p:2x2x2").hosts
        2
    """
    generation, _, sizes = name.strip().lower().partition(":")
    generation = _ALIASES.get(generation, generation)
    numbers = [int(n) for n in sizes.split("x")] if re.fullmatch(r"\d+(x\d+)*", sizes) else []
    dims = _DIMS.get(generation)
    if dims is None:
        raise UnknownTopologyError(
            f"Slices of '{generation}' cannot be launched.",
            values={"generations": ", ".join(_DIMS)},
            remedy="Name one as in 'v5e:4x4' or 'v5p:2x2x2'. Chips with two devices (v2, v3, "
            "tpu7x) cannot be given to a process for each device.",
        )
    if len(numbers) != dims or 0 in numbers:
        raise UnknownTopologyError(
            f"'{name}' is not a slice: {generation} has {dims} dimensions.",
            values={"given": sizes or "no shape"},
            remedy=f"Name one as in '{generation}:{'x'.join('2' * dims)}'.",
        )
    x, y, z = (*numbers, 1)[:3]
    shape = (x, y, z)
    if shape in _ONE_HOST[generation]:
        return Slice(shape, shape)
    if any(n % h for n, h in zip(shape, _HOST)):
        raise UnknownTopologyError(
            f"'{name}' is not a slice: hosts have 2x2 chips.",
            values={"one host": ", ".join(_shown(s, dims) for s in _ONE_HOST[generation])},
            remedy="Take even numbers for the first two dimensions.",
        )
    return Slice(shape, _HOST)


def from_environment(environ: Mapping[str, str], chips: int) -> Slice | None:
    """The slice that the environment of a TPU host describes, None where it tells too little.

    Args:
        environ: As on a TPU VM or in a container of GKE.
        chips: Number of chips of this host.
    """
    host = _bounds(environ.get("TPU_CHIPS_PER_HOST_BOUNDS", ""))
    hosts = _bounds(environ.get("TPU_HOST_BOUNDS", ""))
    if host and hosts:
        x, y, z = (a * b for a, b in zip(host, hosts))
        return Slice((x, y, z), host)
    names = [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    if len(names) > 1:
        return None
    alone: dict[int, Shape] = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
    return Slice(alone[chips], alone[chips]) if chips in alone else None


def _bounds(text: str) -> Shape | None:
    """``"2,2,1"``."""
    match = re.fullmatch(r"(\d+),(\d+),(\d+)", text)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _shown(shape: Shape, dims: int) -> str:
    return "x".join(map(str, shape[:dims]))
