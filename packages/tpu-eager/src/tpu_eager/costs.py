"""Estimates of compile and run time, from a segment's ops and sizes alone.

They are the same in each process, unlike measured times, so that a second process asks for the
programs that the first one left in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from tpu_core.extend import Node, PaddedPrograms, Segment

# Seconds on one core of the CPU platform; see docs/adr/0007-background-compilation.md.
_PROGRAM = 0.05
_OP = 0.0025
_PRODUCT = 0.04
_PRODUCTS = ("mm", "conv", "matmul", "linear", "attention", "einsum", "dot")

# Bytes and products of numbers per second: of one core, and of the smallest TPU at a tenth of its
# peak.
_CPU = (4e9, 1e10)
_TPU = (8e10, 1e13)


# Seconds of one op by a CPU kernel on few elements; a run of a part takes as many as some ops more.
_HOST_OP = 2e-5
HOST_RUN = 8  # ops

# Bytes of values whose products, too, take a CPU kernel no longer than the start of a program.
SMALL = 2**17


def nbytes(s: Segment, slots: Iterable[int | None]) -> int:
    """Bytes of some values of a segment."""
    return sum(s.slots[i].nbytes for i in slots if i is not None)


def compile_seconds(nodes: Sequence[Node]) -> float:
    """Estimate of the seconds to compile ops as one program on one core."""
    names = [name for node in nodes for name in PaddedPrograms.ops_of(node)]
    products = sum(map(_is_product, names))
    return _PROGRAM + _OP * len(names) + _PRODUCT * products


def host_seconds(s: Segment) -> float:
    """Estimate of the seconds that CPU kernels take for a segment, with copies to the host and
    back.
    """
    copied = nbytes(s, [*s.inputs(), *s.live]) / _CPU[0]
    return (
        _HOST_OP * (len(s.nodes) + HOST_RUN) + copied + run_seconds(s, lambda i: s.slots[i].shape)
    )


def run_seconds(s: Segment, shape: Callable[[int], tuple[int, ...]], is_cpu: bool = True) -> float:
    """Estimate of the seconds that a segment runs with arrays of other shapes.

    Args:
        s: The segment.
        shape: Gives the shape of the array of a slot.
        is_cpu: Whether on the CPU platform.
    """
    bandwidth, rate = _CPU if is_cpu else _TPU
    elements = [math.prod(shape(i)) for i in range(len(s.slots))]
    seconds = sum(n * x.dtype.itemsize for n, x in zip(elements, s.slots)) / bandwidth
    for node in s.nodes:
        if any(map(_is_product, PaddedPrograms.ops_of(node))):
            # [m, k] by [k, n]: the root of the product of the three sizes is m * k * n.
            sizes = sorted(elements[i] for i in [*node.operands, *node.outputs] if i is not None)
            seconds += math.sqrt(math.prod(sizes[-3:])) / rate
    return seconds


def _is_product(name: str) -> bool:
    return any(part in name for part in _PRODUCTS)
