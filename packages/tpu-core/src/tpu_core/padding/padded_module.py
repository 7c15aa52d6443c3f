"""The StableHLO module of a padded program: its recordings' traces, run on padded arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from tpu_core import interruptible
from tpu_core.compiler.aliases import aliases
from tpu_core.compiler.segment import Segment, as_function
from tpu_core.errors import CompilationError
from tpu_core.lowering.implementations import for_padded_arrays, lower_for_target
from tpu_core.lowering.tables import Table, replaced
from tpu_core.padding import (  # noqa: F401, they register their rules
    contractions,
    elementwise,
    fourier,
    indexing,
    linalg,
    loops,
    reductions,
    shapes,
    windows,
)
from tpu_core.padding.fit import Fit
from tpu_core.padding.interpret import PaddingContext, run
from tpu_core.padding.layout import Padded, Space, whole
from tpu_core.padding.sizes import NotPaddableError, Size
from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt import jax_settings

Shape = tuple[Size, ...]


def traces(segments: Sequence[Segment], tables: Sequence[list[Table]]) -> list[ClosedJaxpr]:
    """The JAX functions of recordings: of their tables, their inputs and their packed numbers.

    Args:
        segments: The recordings.
        tables: Of each the tables of its ops, in order.

    Raises:
        NotPaddableError: A recording does not make the tables that its ops make.
    """
    found = []
    for segment, own in zip(segments, tables):
        function, avals = as_function(segment)
        traced = jax.make_jaxpr(functools.partial(_with_tables, function))
        with jax_settings.lowering(), for_padded_arrays():
            found.append(traced(own, *avals))
    return found


def _with_tables(
    function: Callable[..., list[jax.Array]], tables: list[jax.Array], *arguments: jax.Array
) -> list[jax.Array]:
    """A segment's function with its tables, if any, as arguments, too."""
    given = iter(tables)
    try:
        with replaced(given):
            results = function(*arguments)
    except CompilationError as error:
        raise NotPaddableError(str(error)) from error
    if next(given, None) is not None:
        raise NotPaddableError("a segment makes fewer tables than its ops")
    return results


def lower(
    segment: Segment,
    fit: Fit,
    recorded: Sequence[ClosedJaxpr],
    tables: Sequence[tuple[Shape, np.dtype[np.generic]]],
    buckets: tuple[int, ...],
    slots: Mapping[int, Shape],
) -> bytes:
    """StableHLO bytecode of the program for some buckets.

    Its arguments are the inputs, packed numbers and tables, and at last the sizes.

    Args:
        segment: A recording, with the numbers that vary as run-time inputs.
        fit: The relations of the sizes.
        recorded: As of `traces`.
        tables: Sizes and dtype of each table.
        buckets: Padded size of each symbol.
        slots: Sizes of the inputs and the live values.

    Raises:
        NotPaddableError: An op cannot run on padded arrays.
    """
    inputs = segment.inputs()

    def bound(slot: int) -> tuple[int, ...]:
        return tuple(s.bound(buckets) for s in slots[slot])

    avals = [jax.ShapeDtypeStruct(bound(i), segment.slots[i].dtype) for i in inputs]
    avals += [jax.ShapeDtypeStruct((n,), pjrt.PACK_DTYPES[k]) for k, n in segment.packs()]
    given = [
        jax.ShapeDtypeStruct([s.value(buckets) for s in sizes], dtype) for sizes, dtype in tables
    ]

    def function(
        rest: list[jax.Array], given: list[jax.Array], actual: jax.Array
    ) -> list[jax.Array]:
        space = Space([actual[i] for i in range(len(buckets))], buckets)
        values = [_prefix(x, sizes) for x, (sizes, _) in zip(given, tables)]
        for x, i in zip(rest, inputs):
            resized = space.resized(x, [s.value(buckets) for s in slots[i]])
            values.append(_prefix(resized, slots[i]))
        values += [whole(x) for x in rest[len(inputs) :]]
        results = run(PaddingContext(fit, space), recorded, values)
        return [
            _between_programs(space, x, slots[i], bound(i)) for i, x in zip(segment.live, results)
        ]

    try:
        with jax_settings.lowering():
            sizes = jax.ShapeDtypeStruct((len(buckets),), np.int32)
            lowered = lower_for_target(function, avals, given, sizes)
            return pjrt.module_bytes(lowered, aliases(segment, bound))
    except NotPaddableError:
        raise
    except Exception as error:  # shapes that do not fit where a rule took two sizes for one
        interruptible.pass_on(error)
        raise NotPaddableError(f"{type(error).__name__}: {error}") from error


def _prefix(x: jax.Array, sizes: Shape) -> Padded:
    return Padded(x, tuple((s,) for s in sizes))


def _between_programs(space: Space, x: Padded, shape: Shape, bound: tuple[int, ...]) -> jax.Array:
    for axis, size in enumerate(shape):
        x = space.as_prefix(x, axis, size)
    return space.resized(jnp.asarray(x.array), bound)
