"""Attention's kernels on each device's batches and heads, in a program that XLA divides."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from tpu_core.extend import OperandSharding, Target
from tpu_kernels.ops.sharding_utils import Axes, dividing

Arrays = Sequence[Any]


def is_probing() -> bool:
    """Return whether the program is lowered to learn how operands come divided: no kernel may be
    in it.
    """
    division = Target.current().division
    return division is not None and not division.is_known


def probe(operands: Arrays) -> list[Any]:
    """Query, key and value, and what follows, to be used in their place while it is asked."""
    division = Target.current().division
    assert division is not None
    return [*division.probe(_key(operands), operands[:3]), *operands[3:]]


def on_parts(function: Callable[..., Any], operands: Arrays, ranks: Sequence[int]) -> Any:
    """``function(*operands)``, called on each device's part where there are several.

    Args:
        function: Of batches and heads that have nothing to do with each other.
        operands: Query, key and value, a bias or None, and further arrays with the dimensions
            (batch, heads, ...).
        ranks: Of the results, which have these dimensions, too.

    Returns:
        A tuple.
    """
    division = Target.current().division
    if division is None:
        return function(*operands)
    axes = _axes(division, operands)
    bias = operands[3]
    given = [*operands[:3], *operands[4:]]
    specs = [_spec(axes, x.ndim) for x in given]
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        given.append(bias)
        specs.append(PartitionSpec(*(a if n > 1 else None for a, n in zip(axes, bias.shape))))

    def part(*arrays: Any) -> Any:
        own = list(arrays)
        own.insert(3, None if bias is None else own.pop())
        return tuple(function(*own))

    mapped = jax.shard_map(
        part,
        mesh=division.mesh,
        in_specs=tuple(specs),
        out_specs=tuple(_spec(axes, rank) for rank in ranks),
        check_vma=False,  # kernels do not say along which axes their results vary
    )
    return mapped(*given)


def _key(operands: Arrays) -> Hashable:
    return ("attention", *(x.shape for x in operands[:3]))


def _spec(axes: tuple[Axes, Axes], rank: int) -> PartitionSpec:
    return PartitionSpec(*(a or None for a in axes), *[None] * (rank - 2))


def _axes(division: OperandSharding, operands: Arrays) -> tuple[Axes, Axes]:
    """Mesh axes of batches and heads; other dimensions are replicated."""
    found = division.axes(_key(operands))
    if found is None:
        return (), ()
    query, key, _ = found
    sizes = division.mesh.shape
    batches = dividing(query[0] or key[0], operands[0].shape[0], sizes)
    heads = [a for a in query[1] or key[1] if a not in batches]
    return batches, dividing(heads, operands[1].shape[1], sizes)
