"""Proofs that a program holds for each size, from a trace with symbolic dims.

In a trace with JAX's symbolic dims an integer is a function of the sizes because it was computed
from them. Where its signature says what the recordings say, no other size need be traced.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import export
from jax.extend.core import ClosedJaxpr

from tpu_core import interruptible
from tpu_core.padding.fit import Fit
from tpu_core.padding.jaxpr_signature import Signature, signature
from tpu_core.padding.sizes import LEAST, Known, NotPaddableError
from tpu_core.pjrt import symbolic_dims

logger = logging.getLogger("tpu_core")

# Traces of single sizes, where there is none with symbolic dims: a few milliseconds each.
_MOST_TRACES = 512
# Values of all sizes for which a comparison in a symbolic trace is worked out.
_MOST_VALUES = 1 << 16


def require_for_all_sizes(
    trace: Callable[[Sequence[Any]], ClosedJaxpr],
    fit: Fit,
    samples: Sequence[ClosedJaxpr],
    bounds: Sequence[int],
) -> None:
    """Require that the traces of all sizes are what the samples say.

    Args:
        trace: The function as JAX traces it for given sizes.
        fit: The samples' sizes, which are its symbols.
        samples: Traces of some sizes.
        bounds: The largest value of each size.

    Raises:
        NotPaddableError: Neither a trace with symbolic dims nor those of all sizes show it.
    """
    form, expected = _expected(fit, [signature(t) for t in samples])
    if _holds_symbolically(trace, form, expected, bounds):
        return
    sizes = [range(LEAST, bound + 1) for bound in bounds]
    if math.prod(len(s) for s in sizes) > _MOST_TRACES:
        raise NotPaddableError(
            "its ops cannot be traced with symbolic dims, and the bounds of its sizes "
            f"({', '.join(map(str, bounds))}) are too many sizes to trace each"
        )
    for values in itertools.product(*sizes):
        found, _, numbers = signature(trace(values))
        if found != form or not all(k.holds(n, values) for k, n in zip(expected, numbers)):
            raise NotPaddableError(f"its ops at sizes {', '.join(map(str, values))} are others")


def _expected(fit: Fit, signatures: Sequence[Signature]) -> tuple[str, list[Known]]:
    form, dtypes, _ = signatures[0]
    if any(other != form for other, _, _ in signatures):
        raise NotPaddableError("its ops depend on a size")
    expected = []
    for seen, dtype in zip(zip(*(numbers for _, _, numbers in signatures)), dtypes):
        known = fit.follow(seen, "int64" if dtype == "int" else dtype)
        if known is None:
            raise NotPaddableError(f"a number that was {', '.join(map(str, seen))} follows no size")
        expected.append(known)
    return form, expected


def _holds_symbolically(
    trace: Callable[[Sequence[Any]], ClosedJaxpr],
    form: str,
    expected: Sequence[Known],
    bounds: Sequence[int],
) -> bool:
    dims = symbolic_dims.dims(len(bounds), LEAST, bounds)
    sizes = [range(LEAST, max(bound, LEAST) + 1) for bound in bounds]
    few = math.prod(map(len, sizes)) <= _MOST_VALUES
    try:
        with symbolic_dims.comparing(dims, [LEAST] * len(bounds)) as conditions:
            found, _, numbers = signature(trace(dims))
        return (
            found == form
            and all(_is(n, k, dims) for n, k in zip(numbers, expected))
            and conditions.always_hold(list(itertools.product(*sizes)) if few else None)
        )
    except Exception as error:  # whatever a lowering makes of a dim that is no integer
        interruptible.pass_on(error)
        logger.debug("no trace with symbolic dims: %s", error)
        return False


def _is(number: Any, known: Known, dims: Sequence[Any]) -> bool:
    if not known.factors:
        return not export.is_symbolic_dim(number) and known.holds(number, ())
    if known.numerator is not None or known.divisor != 1:
        return False
    return bool(number == _count(known, dims))


def _count(known: Known, dims: Sequence[Any]) -> Any:
    return math.prod(size.value(dims) for size in known.factors) + known.offset
