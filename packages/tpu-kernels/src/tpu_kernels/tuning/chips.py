"""The generations that kernels are tuned for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """A generation, as far as a kernel's schedule goes.

    Attributes:
        topology: The smallest that libtpu compiles for.
        clock: Of a TensorCore, in hertz.
        bandwidth: Of the memory, bytes a second and TensorCore.
    """

    topology: str
    clock: float
    bandwidth: float

    @property
    def bytes_a_cycle(self) -> float:
        """Memory bandwidth of a TensorCore in bytes a cycle."""
        return self.bandwidth / self.clock


# Bandwidths are those of Google Cloud's pages of the generations, divided by a chip's TensorCores;
# clocks follow from the peak of bfloat16 products there and the number and size of matrix units.
CHIPS = {
    "v4": Chip("v4:2x2x1", 1.05e9, 1200e9 / 2),
    "v5e": Chip("v5e:2x2", 1.5e9, 819e9),
    "v5p": Chip("v5p:2x2x1", 1.75e9, 2765e9 / 2),
    "v6e": Chip("v6e:2x2", 1.75e9, 1638e9),
    "tpu7x": Chip("tpu7x:2x2x1", 2.2e9, 7380e9 / 2),
}
