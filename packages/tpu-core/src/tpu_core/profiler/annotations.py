"""Names for parts of a program, in PyTorch's profiles and in XLA's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from tpu_core import runtime


@contextmanager
def annotate(name: str) -> Iterator[None]:
    """Name what the block does: a row of the host's, in PyTorch's profile and in XLA's.

    Args:
        name: Name of the row.

    Example:
        >>> with torch.tpu.profiler.annotate("attention"):
        ...     y = attention(x)
    """
    with ExitStack() as stack:
        stack.enter_context(torch.profiler.record_function(name))
        if runtime.is_initialized():
            import jax

            stack.enter_context(jax.profiler.TraceAnnotation(name))
        yield


@contextmanager
def step(number: int, name: str = "train") -> Iterator[None]:
    """Mark a step of a loop, by which XProf divides its times.

    Args:
        number: Of the step.
        name: Name of the loop.

    Example:
        >>> for i, batch in enumerate(loader):
        ...     with torch.tpu.profiler.step(i):
        ...         train_step(batch)
    """
    with ExitStack() as stack:
        stack.enter_context(torch.profiler.record_function(f"{name} {number}"))
        if runtime.is_initialized():
            import jax

            stack.enter_context(jax.profiler.StepTraceAnnotation(name, step_num=number))
        yield
