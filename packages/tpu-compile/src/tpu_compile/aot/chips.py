"""Specifications of TPU generations, per device as JAX counts them, and the topologies made of
them.

Source: the pages of the generations in Google Cloud's documentation ("TPU v2" to "TPU7x
(Ironwood)", https://docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm), per chip; the
number of devices of a chip is what libtpu 0.0.42 reports for a topology.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass

from tpu_core.errors import UnknownTopologyError

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One generation. All figures are of a whole chip.

    Attributes:
        name: As in a topology's name, ``"v5e"``.
        devices: JAX devices of a chip: the two cores of v2, v3, v4 and 7x are compiled for apart.
        hbm: Memory, bytes.
        flops: Peak of bfloat16 products, floating point operations a second.
        bandwidth: Of the memory, bytes a second.
        ici: Of the links to other chips, bytes a second in one direction, all links together.
        dims: Dimensions of the torus.
    """

    name: str
    devices: int
    hbm: float
    flops: float
    bandwidth: float
    ici: float
    dims: int

    @property
    def kind(self) -> str:
        """As the runtime of a TPU calls it, ``"TPU v5e"``."""
        return "TPU7x" if self.name == "tpu7x" else f"TPU {self.name}"

    def per_device(self) -> Chip:
        """The share of one JAX device."""
        n = self.devices
        return Chip(
            self.name, 1, self.hbm / n, self.flops / n, self.bandwidth / n, self.ici / n, self.dims
        )


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v2", 2, 16 * GIB, 46e12, 700e9, 248e9, 2),
        Chip("v3", 2, 32 * GIB, 123e12, 900e9, 328e9, 2),
        Chip("v4", 2, 32 * GIB, 275e12, 1200e9, 300e9, 3),
        Chip("v5e", 1, 16 * GIB, 197e12, 819e9, 200e9, 2),
        Chip("v5p", 1, 95 * GIB, 459e12, 2765e9, 600e9, 3),
        Chip("v6e", 1, 32 * GIB, 918e12, 1638e9, 400e9, 2),
        Chip("tpu7x", 2, 192 * GIB, 2307e12, 7380e9, 600e9, 3),
    )
}
# Other names of the same, as accelerator types and product pages have them.
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "trillium": "v6e", "ironwood": "tpu7x"}
_PATTERN = re.compile(r"([a-z0-9]+):(\d+(?:x\d+)*)")


@dataclass(frozen=True)
class Topology:
    """A slice of TPUs.

    Attributes:
        name: As libtpu knows it, ``"v5p:4x4x4"``.
        chip: Its generation.
        shape: Chips along each dimension of the torus.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """Number of devices as JAX counts them."""
        return self.chips * self.chip.devices


def parse_topology(name: str) -> Topology:
    """The slice that a name such as ``"v5e:2x2"`` stands for.

    Args:
        name: Generation, colon, chips along each dimension: two for v2, v3, v5e and v6e, three for
            v4, v5p and tpu7x.

    Raises:
        UnknownTopologyError: There is no such generation, or it has another number of dimensions.

    Example:
        >>> parse_topology("tpu7x:2x2x1").devices
        8
    """
    match = _PATTERN.fullmatch(name.strip().lower())
    generation = match[1] if match else name.split(":")[0].strip().lower()
    generation = _ALIASES.get(generation, generation)
    chip = CHIPS.get(generation)
    if chip is None:
        near = difflib.get_close_matches(generation, CHIPS, 1, 0.3)
        hint = f"Did you mean '{near[0]}'? " if near else ""
        raise UnknownTopologyError(
            f"'{name}' is not a TPU topology: there is no generation '{generation}'.",
            values={"generations": ", ".join(CHIPS)},
            remedy=f"{hint}Name one as in 'v5e:4x4' or 'v5p:4x4x4'.",
        )
    shape = tuple(int(n) for n in match[2].split("x")) if match else ()
    if len(shape) != chip.dims or 0 in shape:
        raise UnknownTopologyError(
            f"'{name}' is not a TPU topology: {chip.name} is a torus of {chip.dims} dimensions.",
            values={"given": name.partition(":")[2] or "no shape"},
            remedy=f"Name one as in '{chip.name}:{'x'.join('22' if chip.dims == 2 else '444')}'.",
        )
    return Topology(f"{chip.name}:{'x'.join(map(str, shape))}", chip, shape)
