"""Attention over pages on each device's sequences and heads, in a program that XLA divides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from tpu_core.extend import Target
from tpu_kernels.ops.registry import Rule

Axes = tuple[str, ...]
"""Names of a mesh's axes."""

HEADS_DIVIDED = Rule(
    "The program is for one device, or divided by `tpu_compile.aot`: heads, and single tokens of "
    "sequences, then stay divided as they come, and what else is divided is gathered.",
    lambda a, target: target.devices == 1 or target.division is not None,
)


def dividing(
    axes: Sequence[str],
    count: int,
    sizes: Mapping[str, int],
    takes: Callable[[int], bool] = lambda part: True,
) -> Axes:
    """The first of the axes, as many as divide ``count`` evenly.

    Args:
        axes: Of a mesh.
        count: Number to divide.
        sizes: Of the axes.
        takes: Whether so much can be on a device.
    """

    def fits(n: int) -> bool:
        parts = math.prod(sizes[a] for a in axes[:n])
        return count % parts == 0 and (n == 0 or takes(count // parts))

    return tuple(axes[: next(n for n in range(len(axes), -1, -1) if fits(n))])


def on_parts(
    function: Callable[..., jax.Array],
    plain: Callable[..., jax.Array],
    operands: Sequence[jax.Array],
    of_heads: Sequence[int | None],
    of_sequences: Sequence[int | None],
    key_heads: int,
    takes: Callable[[int], bool],
) -> jax.Array:
    """``function(*operands)``, called on each device's part where there are several.

    Args:
        function: Gives an array like the first operand.
        plain: Function of XLA ops with the same result, for tracing the shardings of operands.
        operands: The queries, then pages, then what has no heads.
        of_heads: For each operand the dimension of its heads, or None.
        of_sequences: For each the dimension of sequences that have nothing to do with each other.
        key_heads: Number of heads of the keys.
        takes: Whether the function takes so many of them.
    """
    division = Target.current().division
    if division is None:
        return function(*operands)
    key = ("pages", *(x.shape for x in operands))
    paged = sum(place is not None for place in of_heads)
    if not division.is_known:
        return plain(*division.probe(key, operands[:paged]), *operands[paged:])
    found = division.axes(key) or [[()] * x.ndim for x in operands[:paged]]
    sizes = division.mesh.shape
    asked = [axes[place] for axes, place in zip(found, of_heads) if place is not None]
    heads = dividing(next(filter(None, asked), ()), key_heads, sizes, takes)
    sequences: Axes = ()
    if of_sequences[0] is not None:
        free = [a for a in found[0][of_sequences[0]] if a not in heads]
        sequences = dividing(free, operands[0].shape[of_sequences[0]], sizes)

    def spec(place: int) -> PartitionSpec:
        dims: list[Any] = [None] * operands[place].ndim
        for axes, dim in ((heads, of_heads[place]), (sequences, of_sequences[place])):
            if dim is not None and axes:
                dims[dim] = axes
        return PartitionSpec(*dims)

    specs = tuple(map(spec, range(len(operands))))
    mapped: Callable[..., jax.Array] = jax.shard_map(
        function,
        mesh=division.mesh,
        in_specs=specs,
        out_specs=specs[0],
        check_vma=False,  # kernels do not say along which axes their results vary
    )
    return mapped(*operands)
