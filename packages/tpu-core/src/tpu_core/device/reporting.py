"""Counters, reports, comparisons and the promise to compile nothing: `torch.tpu.metrics`,
`compile_report`, `compare`, `no_recompile`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def metrics() -> dict[str, float]:
    """Counters since the start or the last `reset_metrics`; `tpu_core.metrics.COUNTERS` explains
    them.
    """
    from tpu_core.metrics import METRICS

    return METRICS.snapshot()


def reset_metrics() -> None:
    """Set every counter to zero."""
    from tpu_core.metrics import METRICS

    METRICS.reset()


def compile_report() -> Any:
    """Compiles with their reasons, cache hits, fallbacks and host syncs.

    ``print`` shows it as tables. Its ``save_html(path)`` writes a page, which a notebook shows at
    once: the ops of each program with their lines, why it was cut and what made it necessary.

    Example:
        >>> torch.tpu.compile_report().save_html("compiles.html")
    """
    from tpu_core.metrics import METRICS
    from tpu_core.report import build_report

    return build_report(METRICS)


def compare(module: Any, *args: Any, **options: Any) -> Any:
    """Compare a module on the device with itself on the CPU in float64, layer by layer.

    Results and gradients of each submodule, with the error of that layer alone and the error that
    has accumulated up to it: see `tpu_core.comparison.compare`, which lists the options and errors.

    Args:
        module: A `torch.nn.Module`; it stays as it is.
        *args: Its arguments.
        **options: ``kwargs``, ``loss``, ``backward``, ``tolerance``.

    Returns:
        A `tpu_core.comparison.Comparison`; ``print`` shows it as a table.

    Example:
        >>> print(torch.tpu.compare(model, batch, tolerance=32))
    """
    from tpu_core.comparison import compare

    return compare(module, *args, **options)


@contextmanager
def no_recompile() -> Iterator[None]:
    """Context manager: raise where a program has to be compiled, instead of compiling it.

    Holds for every thread of the process. What was recorded before the block is run first, and what
    the block recorded at its end, so that neither is held against the other. Loading a program from
    the cache folder is not compiling.

    Raises:
        RecompilationError: A program was neither in memory nor on disk; says which op or argument
            was new, and against what.

    Example:
        >>> step(batch)
        >>> with torch.tpu.no_recompile():
        ...     step(batch)
    """
    from tpu_core import _C
    from tpu_core.compiler.programs import compiling_forbidden

    _C.flush("start of no_recompile")
    with compiling_forbidden():
        yield
        _C.flush("end of no_recompile")
