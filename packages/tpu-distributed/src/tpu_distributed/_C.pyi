from typing import Any

import torch

def make_backend(rank: int, size: int, name: str, timeout: float, implementation: Any) -> Any:
    """A c10d backend whose collectives are methods of a Python object.

    Args:
        rank: Of this process in the group.
        size: Number of processes.
        name: Of the backend.
        timeout: Seconds that c10d allows a collective unless a call says otherwise.
        implementation: Has c10d's collectives as methods, ``all_reduce(tensors, op, options)`` and
            so on, each of which returns a work (see `tpu_distributed.group.Group`).

    Example:
        >>> backend = make_backend(0, 2, "tpu", 600.0, group)
    """

def ring_all_reduce(
    source: int,
    out: int,
    elements: int,
    dtype: torch.dtype,
    op: str,
    factor: float,
    divisor: int,
    rank: int,
    size: int,
    next: int,
    previous: int,
    seconds: float,
) -> None:
    """Reduce memory of this process with that of others around a ring of sockets.

    Args:
        source, out: Addresses of ``elements`` numbers each; they may be equal.
        elements: Number of elements.
        dtype: Of a number.
        op: ``"SUM"``, ``"MIN"``, ...
        factor: Number that this process' elements are multiplied by first.
        divisor: Number that the results are divided by.
        rank, size: Of this process in the ring, and of the ring.
        next, previous: File descriptors of connections to the neighbours.
        seconds: Longest wait for a neighbour.

    Raises:
        TimeoutError: A neighbour does not answer.
        OSError: A connection was lost.

    Example:
        >>> ends = to.fileno(), of.fileno()
        >>> ring_all_reduce(p, p, n, torch.float32, "SUM", 1.0, 1, 0, 2, *ends, 60.0)
    """
