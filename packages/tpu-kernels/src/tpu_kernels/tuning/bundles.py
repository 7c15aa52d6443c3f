"""Cost of a kernel's step, counted in the schedule that libtpu dumps.

A TensorCore issues one bundle a cycle, in order, so that a stretch of the schedule without branches
takes as many cycles as it has bundles, unless it waits for memory. A kernel of Pallas is a loop
over its grid; what is under `pl.when` in it is a region of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?:")
_EDGE = re.compile(r"(Start|End) region (\d+)")


@dataclass(frozen=True, slots=True)
class Bundles:
    """Cycles of the parts of a kernel that meets blocks one after the other.

    Attributes:
        block: To compute a block.
        step: Of a step of the grid besides, also where its block is skipped.
        once: At the first and the last step of what is summed.
    """

    block: int
    step: int
    once: int


@dataclass(frozen=True, slots=True)
class _Region:
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def encloses(self, other: _Region) -> bool:
        return self != other and self.start <= other.start and other.stop <= self.stop


def count(lines: Iterable[str]) -> Bundles:
    """The parts of a kernel whose block, first and last step are each under a `pl.when`.

    Args:
        lines: Of the file ``final_bundles`` that libtpu writes for the kernel.

    Raises:
        ValueError: The schedule has no such parts.

    Example:
        >>> with open("attention.1-76-final_bundles.txt") as file:
        ...     count(file)
        Bundles(block=1145, step=90, once=579)
    """
    regions = sorted(_regions(lines), key=lambda r: r.size, reverse=True)
    if not regions:
        raise ValueError("The schedule has no loop with regions in it.")
    loop = regions[0]
    # The block is the largest that is not mostly another one.
    block = next(
        r for r in regions if not any(r.encloses(o) and 2 * o.size > r.size for o in regions)
    )
    inside = [r for r in regions if loop.encloses(r)]
    before = [r.size for r in inside if r.stop <= block.start]
    after = [r.size for r in inside if r.start >= block.stop]
    if not (loop.encloses(block) and before and after):
        raise ValueError("The schedule has no first step, block and last step.")
    once = max(before) + max(after)
    return Bundles(block.size, loop.size - block.size - once, once)


def _regions(lines: Iterable[str]) -> Iterator[_Region]:
    """Those that end; they may overlap, and some that start on the way never do."""
    starts: dict[str, int] = {}
    position = 0
    for line in lines:
        position += _BUNDLE.match(line) is not None
        for edge, number in _EDGE.findall(line):
            if edge == "Start":
                starts[number] = position
            elif number in starts and position > starts[number]:
                yield _Region(starts[number], position)
