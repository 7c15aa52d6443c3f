"""A part of a program whose sizes the program itself computes: how many elements are true, say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

import tpu_core.padding.bucketed_program  # noqa: F401  # its import registers the rules
from tpu_core.padding.fit import Fit
from tpu_core.padding.interpret import PaddingContext, run
from tpu_core.padding.layout import Padded, Space
from tpu_core.padding.sizes import NotPaddableError, static
from tpu_core.padding.symbolic import require_for_all_sizes

# Each size has values that are neither equal to nor multiples of another's.
_SAMPLES = ((5, 7, 11), (13, 17, 19), (23, 29, 31), (37, 41, 43))


def run_with_dynamic_counts(
    trace: Callable[[Sequence[int]], ClosedJaxpr],
    inputs: Sequence[tuple[jax.Array, Sequence[int | None]]],
    counts: Sequence[jax.Array],
    bounds: Sequence[int],
) -> list[jax.Array]:
    """The results of a function of arrays whose sizes are known at run time alone.

    Args:
        trace: The function as JAX traces it for given sizes.
        inputs: Its arguments, where a size is computed with the bound in its place, and for each
            dim the index of the size, or None. What lies past a size does not reach the results.
        counts: The sizes, ``int32[]``.
        bounds: The largest value of each.

    Returns:
        The results, whose own sizes do not depend on the counts.

    Raises:
        NotPaddableError: An op cannot run on padded arrays, a result has such a size, or it cannot
            be shown that the function is the same for each size.

    Example:
        >>> double_sum = lambda sizes: jax.make_jaxpr(lambda x: (x * 2).sum())(jnp.zeros(sizes[0]))
        >>> run_with_dynamic_counts(double_sum, [(jnp.arange(8.0), [0])], [jnp.int32(3)], [8])
        [Array(6., dtype=float32)]
    """
    if len(counts) > len(_SAMPLES):
        raise NotPaddableError(f"{len(counts)} sizes are computed, at most {len(_SAMPLES)} can be")
    samples = list(zip(*_SAMPLES[: len(counts)]))
    fit = Fit(samples, range(len(counts)))
    space = Space(counts, tuple(bounds))
    symbols = [fit.sizes[i] for i in range(len(counts))]
    values = [
        Padded(
            array,
            tuple(
                (static(n) if i is None else symbols[i],)
                for n, i in zip(array.shape, dims, strict=True)
            ),
        )
        for array, dims in inputs
    ]
    traces = [trace(s) for s in samples]
    require_for_all_sizes(trace, fit, traces, bounds)
    results = run(PaddingContext(fit, space), traces, values)
    if not all(x.is_static for x in results):
        raise NotPaddableError("a result has a size that is computed")
    return [jnp.asarray(x.array) for x in results]
